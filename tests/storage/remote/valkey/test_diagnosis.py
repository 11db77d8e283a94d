"""What is said of a server that cannot be used: what is wrong, and no secret."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from storage.certificates import make_certificates, tls_options
from storage.places import make_setup
from storage.remote_place import LAYERS, PAGE_BYTES
from storage.servers import REDIS_OPTIONS, Server, free_port, redis_program, require_client, running, tell

from lwkv.config.settings import Config
from lwkv.errors import ConfigError
from lwkv.storage.remote.valkey.address import read_address
from lwkv.storage.remote.valkey.connecting import connect
from lwkv.storage.remote.valkey.tier import examine, open_tier

SECRET = "s3cret"
HINT = "docs/remote.md lists"


def why(url: str) -> str:
    """What the doctor says, and the log at the start: the same, without a secret."""
    with pytest.raises((ConfigError, ConnectionError)) as refused:
        examine(f"{url}{'&' if '?' in url else '?'}connect_timeout_s=0.5", Config())
    assert SECRET not in str(refused.value)
    return str(refused.value)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


@contextmanager
def encrypted(folder: Path, certificate: str, *others: str) -> Iterator[int]:
    port = free_port()
    options = tls_options(port, certificate, *others)
    with running(Server([redis_program(), *REDIS_OPTIONS, *options], port, folder)):
        yield port


@pytest.mark.parametrize(
    ("certificate", "query", "told"),
    [
        (
            "cert.pem",
            "ca={}/stranger.pem",
            "certificate is refused: .*self.signed certificate in certificate",
        ),
        ("cert.pem", "", "certificate is refused: .*self.signed certificate in certificate chain"),
        ("another.pem", "ca={}/ca.pem", "certificate is refused: .*not valid for '127.0.0.1'"),
        ("old.pem", "ca={}/ca.pem", "certificate is refused: certificate has expired"),
        ("self.pem", "ca={}/self.pem", "certificate is its own authority, which the client refuses"),
    ],
)
def test_what_is_wrong_with_a_certificate_is_reported(
    certificates: Path, certificate: str, query: str, told: str
) -> None:
    with (
        encrypted(certificates, certificate, "--tls-auth-clients", "no") as port,
        pytest.raises(ConnectionError, match=f"cannot be reached: the server's {told}"),
    ):
        connect(read_address(f"rediss://127.0.0.1:{port}?connect_timeout_s=0.5&{query.format(certificates)}"))


def test_a_certificate_that_the_server_wants_and_a_line_in_the_clear_are_reported(certificates: Path) -> None:
    with encrypted(certificates, "cert.pem") as port:
        told = why(f"rediss://127.0.0.1:{port}?ca={certificates}/ca.pem")
        assert re.search("wants a certificate[:,] give cert and key", told)
        assert "if it wants TLS, write valkeys:// or rediss://" in why(f"redis://127.0.0.1:{port}")


def test_tls_to_a_server_in_the_clear_is_reported(redis: Server) -> None:
    assert "write valkey:// or redis:// if it wants none" in why(f"rediss://127.0.0.1:{redis.port}")


@pytest.mark.parametrize(
    ("rights", "path", "told"),
    [
        ("", "", f"{HINT}: CLIENT SETNAME"),
        ("+client|setname", "", f"{HINT}: INFO server"),
        ("+info +client|setname", "/1", f"{HINT}: SELECT 1"),
        ("+@all", "/99", "database 99 cannot be used: ERR DB index is out of range"),
    ],
)
def test_a_right_that_the_user_lacks_and_a_database_that_is_none_are_refused_at_the_start(
    redis: Server, rights: str, path: str, told: str
) -> None:
    tell(redis, "ACL", "SETUSER", f"{SECRET}-name", "reset", "on", f">{SECRET}", "~lwkv:*", *rights.split())
    url = f"redis://{SECRET}-name:{SECRET}@127.0.0.1:{redis.port}{path}?connect_timeout_s=0.5"
    with pytest.raises(ConfigError, match=told) as refused:
        open_tier(url, make_setup(PAGE_BYTES, LAYERS))
    assert SECRET not in str(refused.value)


def test_a_server_that_is_not_there_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    require_client()
    port = free_port()
    assert why(f"redis://someone:{SECRET}@127.0.0.1:{port}").endswith("cannot be reached: Connection refused")
    assert "the name 'no.such.host.invalid' is not known" in why("redis://no.such.host.invalid")
    told = why(f"redis://127.0.0.1:{port},127.0.0.1:{free_port()}")
    assert told.endswith(f"127.0.0.1:{port}: Connection refused")


def test_what_takes_connections_and_says_nothing_is_reported() -> None:
    require_client()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        told = why(f"redis://127.0.0.1:{silent.getsockname()[1]}")
    assert "it takes the connection, but says nothing within 0." in told
