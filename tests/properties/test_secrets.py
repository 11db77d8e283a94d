"""Users and passwords are told to nobody but the server."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from lwkv.cli.doctor.report import Report, lines
from lwkv.cli.doctor.tiers import examine_tiers
from lwkv.config.settings import Config
from lwkv.errors import ConfigError
from lwkv.storage import TierSetup
from lwkv.storage.registry import open_tiers
from lwkv.storage.remote.remote_url import PASSWORD, USER, parse_remote_url
from lwkv.telemetry.counters import Counters

SECRET = "s3cret"
URL = f"valkey://someone:{SECRET}@host:1"
BROKEN = (
    f"valkey://someone:{SECRET}@host:port",
    f"valkey://someone:{SECRET}@",
    f"valkey://someone:{SECRET}@host?color=red",
    f"valkey://someone:{SECRET}@host?cluster=maybe",
    f"valkey://someone:{SECRET}/more@host",
    f"valkey://someone:{SECRET}?more@host",
    f"valkey://someone:a@{SECRET}@host:port",
)


def test_a_configuration_shows_no_password() -> None:
    config = Config(remote_url=URL)
    assert config.remote_url == URL
    assert SECRET not in f"{config!r} {config}"


@pytest.mark.parametrize("setting", [{"chunk_size": 0}, {"local_disk": "/a"}, {"color": "red"}])
def test_errors_about_other_settings_show_no_password(
    setting: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LWKV_REMOTE_URL", URL)
    with pytest.raises(ConfigError) as refused:
        Config.load(**setting)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("source", ["argument", "environment"])
def test_errors_about_the_address_show_no_password(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = f"redis://someone:{SECRET}@ho st"
    monkeypatch.setenv("LWKV_REMOTE_URL", wrong if source == "environment" else URL)
    with pytest.raises(ConfigError, match=r"redis://\*\*\*@ho st") as refused:
        Config.load(**({"remote_url": wrong} if source == "argument" else {}))
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("source", ["argument", "environment"])
@pytest.mark.parametrize(
    "wrong",
    [
        f"someone:{SECRET}@host:1",
        f"redis//someone:{SECRET}@host:1",
        f"redis:/someone:{SECRET}@host:1",
        f"redis://someone:a {SECRET}@host:1",
        f"redis://someone:a'\n{SECRET}@host:1",
        f'redis://someone:"@{SECRET} x@host:1',
    ],
)
def test_of_an_address_that_is_none_only_what_follows_the_at_is_shown(
    source: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "environment":
        monkeypatch.setenv("LWKV_REMOTE_URL", wrong)
    with pytest.raises(ConfigError, match=r"remote_url: got .*\*\*\*@host:1") as refused:
        Config.load(**({"remote_url": wrong} if source == "argument" else {}))
    assert SECRET not in str(refused.value)
    assert "someone" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        f"remote_url: someone {SECRET}",
        f"remote_url: {{redis: someone:{SECRET}}}",
        f"remote_url: [{SECRET}]",
        f"remote_url: redis://someone:{SECRET}: x@h",
        f"remote_password: {SECRET}",
        f"api_token: {SECRET}",
        f"server: {{user: {SECRET}}}",
        f"extra_config: {{remote_password: {SECRET}}}",
        f"extra_config: [password, {SECRET}]",
        f"[password, {SECRET}]",
    ],
)
def test_a_file_that_is_refused_shows_no_password(text: str, tmp_path: Path) -> None:
    file = tmp_path / "lwkv.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        Config.load(file)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("text", ["{{remote_password: {}}}", "{{password: {}", "password {}"])
def test_extra_settings_of_the_environment_show_no_password(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LWKV_EXTRA_CONFIG", text.format(SECRET))
    with pytest.raises(ConfigError, match="LWKV_EXTRA_CONFIG") as refused:
        Config.load()
    assert SECRET not in str(refused.value)


def test_settings_that_contradict_each_other_show_no_password() -> None:
    url = f"redis://someone:a'{SECRET}@host:1"
    with pytest.raises(ConfigError) as refused:
        Config(remote_url=url, local_cpu=False, write_policy="write_back")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["LWKV_REMOTE_PASWORD", "LWKV_PASSWORD", "LWKV_REMOTE_PASSPHRASE", "LWKV_PW"]
)
def test_a_variable_that_is_misspelt_is_refused_without_its_value(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, SECRET)
    with pytest.raises(ConfigError, match=name) as refused:
        Config.load()
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("key", ["chunk_size", "local_disk", "color"])
@pytest.mark.parametrize("login", [f"someone%3A{SECRET}%40host", f"someone%3a{SECRET}", f"{SECRET}%40host"])
def test_a_login_that_is_encoded_as_in_a_url_is_not_shown(key: str, login: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Config.load(**{key: login})
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("url", BROKEN)
def test_an_address_that_cannot_be_read_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="remote_url") as refused:
        parse_remote_url(url, 6379, ("cluster",)).flag("cluster", False)
    assert SECRET not in str(refused.value)


def test_an_address_that_was_read_shows_no_password() -> None:
    url = parse_remote_url(URL, 6379, ())
    assert (url.user, url.password) == ("someone", SECRET)
    told = f"{url!r} {url} {url.refuse('no')}"
    assert SECRET not in told
    assert "someone" not in told


@pytest.mark.parametrize("url", [URL, *BROKEN])
def test_no_address_shows_its_password_to_a_user_or_the_doctor(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    address = url.replace("host", "127.0.0.1")
    told = all_that_is_shown(lambda: Config(remote_url=address), caplog)
    assert "remote_url" in told
    assert SECRET not in told


def test_the_variables_for_user_and_password_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USER, "someone")
    monkeypatch.setenv(PASSWORD, SECRET)
    assert SECRET not in repr(Config.load())


# Nothing else in an error text has four of these in a row.
SECRETS = st.text("QXZJKVWY0123456789:/?#@%!&*'\" \\{}[],=", min_size=8, max_size=300)
SHAPES = (
    "{0}://someone:{1}@host:6379",
    "{0}://:{1}@host/0",
    "{0}://someone:{1}@",
    "{0}://someone:{1}@host:port",
    "{0}://someone:{1}@ho st",
    "{0}://someone:{1}@one:1,two:2?cluster=true",
    "{0}:/someone:{1}@host:1",
    "{0}//someone:{1}@host:1",
    "someone:{1}@host:6379",
    "{1}@host",
    "{0}://host:6379?password={1}",
    "{0}://someone:{1}",
    "someone:{1}",
)
WITHOUT_HOST = ("{0}://host:6379?password={1}", "{0}://someone:{1}", "someone:{1}")
KEYS = (
    *("remote_url", "remote_ulr", "remoteurl", "remote_server", "redis", "local_disk", "chunk_size"),
    *("blend_special_str", "use_gpu", "extra_config", "external_lookup_client", "remote_password"),
)


def looks_like_a_port(secret: str) -> bool:
    """Then nobody can know that what precedes it is no host."""
    return re.match(r"\s*[0-9]{1,5}\s*($|[,/?#])", secret) is not None


def pieces(secret: str) -> set[str]:
    return {secret[i : i + 4] for i in range(len(secret) - 3)}


def all_that_is_shown(load: Callable[[], Config], caplog: pytest.LogCaptureFixture) -> str:
    """What becomes of a configuration, as text: an error with its traceback, or what is made of it."""
    caplog.clear()
    try:
        config = load()
    except ConfigError:
        return f"{traceback.format_exc().rpartition('ConfigError')[2]} {caplog.text}"
    report = Report({"lwkv": "0"})
    examine_tiers(report, config)
    return f"{config!r} {config} {report} {list(lines(report))} {caplog.text}"


@pytest.mark.parametrize("source", ["argument", "environment", "file", "inside"])
@settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@example(key="chunk_size", shape="{0}://someone:{1}", scheme="valkey", secret=" 000000=")
@given(
    key=st.sampled_from(KEYS),
    shape=st.sampled_from(SHAPES),
    scheme=st.sampled_from(["valkey", "redis", "rediss", "mooncake", "nosuch"]),
    secret=SECRETS,
)
def test_no_piece_of_a_password_is_shown_whatever_the_key_and_the_form_of_the_address(
    source: str,
    key: str,
    shape: str,
    scheme: str,
    secret: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # What follows the last @ is the host: a password without a host must not have one.
    assume(shape not in WITHOUT_HOST or not ("@" in secret or looks_like_a_port(secret)))
    text = shape.format(scheme, secret)

    def load() -> Config:
        with pytest.MonkeyPatch.context() as patch:
            if source == "environment":
                patch.setenv(f"LWKV_{key.upper()}", text)
                return Config.load()
            if source == "argument":
                return Config.load(**{key: text})
            file = tmp_path / "lwkv.yaml"
            file.write_text(f"{key}: {json.dumps(text if source == 'file' else {'server': [text]})}")
            return Config.load(file)

    told = all_that_is_shown(load, caplog)
    assert [piece for piece in pieces(secret) if piece in told] == []


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    secret=st.text("QXZJKVWY0123456789", min_size=8, max_size=40),
    form=st.sampled_from(
        [
            "remote_password: !{}",
            "a: !{}!b c",
            "a: !<{}> c",
            "a: &{} b\nc: &{} d",
            "a: *{}",
            "a: '%{}",
            "%{} a\n---\n[1",
        ]
    ),
)
def test_no_piece_of_a_text_that_is_no_plain_yaml_is_shown(secret: str, form: str, tmp_path: Path) -> None:
    text = form.replace("{}", secret)
    file = tmp_path / "lwkv.yaml"
    file.write_text(text)
    for load in (lambda: Config.load(file), lambda: _load_extra(f"{{{text}}}")):
        with pytest.raises(ConfigError) as refused:
            load()
        told = "".join(traceback.format_exception(refused.value)).rpartition("ConfigError")[2]
        assert [piece for piece in pieces(secret) if piece in told] == []


def _load_extra(text: str) -> Config:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LWKV_EXTRA_CONFIG", text)
        return Config.load()


@pytest.mark.parametrize("path", [URL, f"someone:{SECRET}@host", f"valkey://someone:{SECRET}"])
def test_the_name_of_a_file_that_is_an_address_is_shown_without_password(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LWKV_CONFIG_FILE", path)
    for load in (Config.load, lambda: Config.load(path)):
        with pytest.raises(ConfigError, match="cannot be read") as refused:
            load()
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize("folder", [f"someone:{SECRET}@host:1", f"file://someone:{SECRET}", f"{SECRET}@host"])
def test_a_folder_that_is_an_address_is_refused_without_its_password(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config(local_disk=folder, max_local_disk_size=0.1)
    report = Report({"lwkv": "0"})
    examine_tiers(report, config)
    assert len(report.faults) == 1
    assert SECRET not in f"{report} {list(lines(report))} {config!r}"
    with pytest.raises(ConfigError) as refused:
        open_tiers(TierSetup(config, 2, 96, "canonical", Counters()))
    assert SECRET not in str(refused.value)
    assert not list(tmp_path.iterdir()), "no folder of that name is made"
