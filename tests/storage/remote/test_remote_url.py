from __future__ import annotations

import pytest

from lwkv.errors import ConfigError
from lwkv.storage.remote.remote_url import PASSWORD, USER, parse_remote_url

OPTIONS = ("cluster", "timeout_s", "segment_gib")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("redis://here", [("here", 6379)]),
        ("redis://here:1", [("here", 1)]),
        ("redis://here:1/", [("here", 1)]),
        ("redis://a:1,b,c:3", [("a", 1), ("b", 6379), ("c", 3)]),
        ("redis://[::1]:1,[fe80::2]", [("::1", 1), ("fe80::2", 6379)]),
        ("redis://10.0.0.7:7001?cluster=true", [("10.0.0.7", 7001)]),
    ],
)
def test_hosts_are_read_in_order_and_have_ports(text: str, hosts: list[tuple[str, int]]) -> None:
    assert list(parse_remote_url(text, 6379, OPTIONS).hosts) == hosts


def test_an_address_is_shown_without_login_path_and_options() -> None:
    url = parse_remote_url("VALKEYS://u:p@[::1],b:2/3?cluster=on", 6379, OPTIONS)
    assert str(url) == "valkeys://[::1]:6379,b:2"
    assert (url.scheme, url.path, url.options) == ("valkeys", "3", {"cluster": "on"})


@pytest.mark.parametrize(
    ("login", "user", "password"),
    [
        ("u:p@", "u", "p"),
        ("u@", "u", "env p"),
        (":p@", "env u", "p"),
        ("", "env u", "env p"),
        ("a%40b:c%3A%2Fd@", "a@b", "c:/d"),
    ],
)
def test_login_comes_from_the_url_and_else_from_the_environment(
    login: str, user: str, password: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(USER, "env u")
    monkeypatch.setenv(PASSWORD, "env p")
    url = parse_remote_url(f"redis://{login}here", 1, ())
    assert (url.user, url.password) == (user, password)


def test_without_login_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(USER, raising=False)
    monkeypatch.setenv(PASSWORD, "")
    url = parse_remote_url("redis://here", 1, ())
    assert (url.user, url.password) == (None, None)


def test_options_are_read_as_what_they_are() -> None:
    assert read_all("redis://here?cluster=no&timeout_s=0.5&segment_gib=1.5") == (False, 0.5, 3 << 29)
    bare = parse_remote_url("redis://here", 1, OPTIONS)
    assert (bare.flag("cluster", True), bare.seconds("timeout_s", 2), bare.gib("segment_gib", 0)) == (
        True,
        2,
        0,
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("redis://", "no host is where a host should be"),
        ("redis://a,,b", "no host is where a host should be"),
        ("redis://a#b", "no host is where a host should be"),
        ("redis://[::1", "an IPv6 address is written in brackets"),
        ("redis://a:0", "no port, a number from 1 to 65535"),
        ("redis://a:b", "remote_url redis://***: what follows the last colon is no port"),
        ("redis://a:70000", "no port, a number from 1 to 65535"),
        ("redis://a?color=red", "there is no option 'color'; allowed: cluster, timeout_s, segment_gib"),
        ("redis://a?cluster=1&cluster=1", "option 'cluster' is given twice"),
        ("redis://a?cluster=", "cluster is ''; allowed: true or false"),
        ("redis://a?timeout_s=0", "timeout_s is '0'; allowed: a number above 0"),
        ("redis://a?timeout_s=soon", "timeout_s is 'soon'; allowed: a number above 0"),
        ("redis://a?timeout_s=nan", "timeout_s is 'nan'"),
        ("redis://a?segment_gib=-1", "segment_gib is '-1'; allowed: 0 or more"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match="remote_url") as refused:
        read_all(text)
    assert told in str(refused.value)


def read_all(text: str) -> tuple[bool, float, int]:
    url = parse_remote_url(text, 1, OPTIONS)
    return url.flag("cluster", False), url.seconds("timeout_s", 1), url.gib("segment_gib", 0)
