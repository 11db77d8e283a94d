"""Who may not own, and who may not be a client: each is refused with a reason."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from shared_host.owners import owner_at, pool_at, session_at
from storage.rig import PAGE_BYTES

from lwkv.cli.main import main
from lwkv.errors import ConfigError
from lwkv.platforms.xpu import XPU
from lwkv.shared_host import greeting
from lwkv.shared_host.client import connecting
from lwkv.shared_host.client.connecting import NoOwnerError, connect, wait_for_owner
from lwkv.shared_host.client.keeper import Waker
from lwkv.shared_host.client.session import Session
from lwkv.shared_host.greeting import Hello
from lwkv.shared_host.mapping import map_memory
from lwkv.shared_host.memfd import is_sealed, make_memory
from lwkv.shared_host.owner import server
from lwkv.shared_host.owner.address import Address


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "host.sock"


def leave(session: Session) -> None:
    session.connection.close()
    session.connection.release()


def greet(path: Path, hello: Hello) -> None:
    leave(connect(str(path), hello, 5.0, Waker()))


def test_the_socket_is_for_its_user_alone_and_goes_with_the_owner(path: Path) -> None:
    with owner_at(path, 4):
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


def test_a_second_owner_at_the_same_socket_is_refused(path: Path) -> None:
    with owner_at(path, 4):
        with pytest.raises(ConfigError, match=r"another owner listens at .*: use it, end it, or give"):
            Address(str(path))
        leave(session_at(path))
    Address(str(path)).close()


def test_a_socket_that_a_killed_owner_left_is_taken_over(path: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    with owner_at(path, 4):
        leave(session_at(path))


def test_a_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(ConfigError, match="there is a file that is no socket"):
        Address(str(path))
    assert path.read_text() == "mine"


@pytest.mark.parametrize("name", ["version", "page_format"])
def test_a_client_of_another_version_is_refused(path: Path, name: str) -> None:
    with owner_at(path, 4):
        with pytest.raises(ConfigError, match=r"refused: .* run both from the same version of lwkv"):
            greet(path, Hello(4096, **{name: 99}))
        greet(path, Hello(4096))


@pytest.mark.parametrize("stride", [5, -4096, 20480, 1 << 62])
def test_pages_that_cannot_be_are_refused(path: Path, stride: int) -> None:
    with owner_at(path, 4), pytest.raises(ConfigError, match=r"got page_stride|a page has|and a page"):
        greet(path, Hello(stride))


def test_a_client_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with owner_at(path, 4):
        monkeypatch.setattr(server, "peer_of", lambda _: (1, os.geteuid() + 1))
        with pytest.raises(NoOwnerError, match="no owner of host memory answers"):
            greet(path, Hello(4096))


def test_an_owner_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with owner_at(path, 4):
        monkeypatch.setattr(connecting, "peer_of", lambda _: (1, os.geteuid() + 1))
        with pytest.raises(ConfigError, match="run owner and engines as one user"):
            greet(path, Hello(4096))


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(str(path))
        line.listen()
        yield line


def test_what_does_not_answer_is_no_owner(path: Path) -> None:
    with listening(path), pytest.raises(NoOwnerError):
        connect(str(path), Hello(4096), 5.0, Waker(), hello_s=0.05)


def test_an_engine_without_an_owner_is_refused_with_the_command_that_starts_one(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"start it with: lwkv host --size GIB --socket .*host\.sock"):
        wait_for_owner(str(path), Hello(4096), 1.0, Waker(), 0.01)


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allowed: 1 to 107"):
        Address(str(tmp_path / ("x" * 120)))


def test_a_platform_that_cannot_lock_shared_memory_is_refused(path: Path) -> None:
    refusal = pytest.raises(ConfigError, match="the platform xpu cannot page-lock")
    with owner_at(path, 4), refusal, pool_at(path, PAGE_BYTES, XPU()):
        pass


def test_memory_is_sealed_and_one_that_is_not_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = make_memory(8192)
    assert is_sealed(descriptor)
    with pytest.raises(OSError, match="Operation not permitted"):
        os.ftruncate(descriptor, 4096)
    with pytest.raises(ValueError, match="has 8192 bytes"):
        map_memory(descriptor, 16384)
    os.close(descriptor)
    plain = os.memfd_create("plain")
    assert not is_sealed(plain)
    os.close(plain)
    with owner_at(path, 4):
        monkeypatch.setattr(connecting, "is_sealed", lambda _: False)
        with pytest.raises(ConfigError, match="may shrink"):
            greet(path, Hello(4096))


@pytest.mark.parametrize("size", ["0", "-1", "nan", "0.0001", "1e9"])
def test_sizes_that_cannot_be_are_refused(size: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["host", "--size", size, "--socket", str(path)]) == 2
    assert "--size: got" in capsys.readouterr().err
    assert not path.exists()


def test_versions_are_those_of_the_tree() -> None:
    assert greeting.why_not(Hello(4096)) is None
