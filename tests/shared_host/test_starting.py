"""An owner that the first engine starts: one for all, which ends when nobody uses it any more."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest
from shared_host.owners import LONG_S
from shared_host.workers import wait_for

from lwkv.errors import ConfigError
from lwkv.platforms.cpu import CPU
from lwkv.shared_host.client import connecting, opening, starting, wait_log
from lwkv.shared_host.client.connecting import wait_for_owner
from lwkv.shared_host.client.opening import open_node_memory
from lwkv.shared_host.client.pool import NodePool
from lwkv.shared_host.client.session import Session
from lwkv.shared_host.client.starting import OwnerStarter
from lwkv.shared_host.client.wait_log import WaitLog
from lwkv.shared_host.greeting import Hello
from lwkv.shared_host.memfd import make_memory
from lwkv.shared_host.owner.address import Address
from lwkv.shared_host.owner.server import Memory, Server
from lwkv.shared_host.process import peer_of
from lwkv.telemetry.counters import Counters


def opened(path: Path, gib: float) -> NodePool:
    pool, _ = open_node_memory(str(path), CPU(), 4096, LONG_S, Counters(), start_gib=gib)
    return pool


def test_engines_that_start_at_once_have_one_owner_which_ends_after_the_last_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "LINGER_S", 1.5)
    path = tmp_path / "host.sock"
    with ThreadPoolExecutor(2) as threads:
        pools = list(threads.map(lambda _: opened(path, 0.01), range(2)))
    sessions = [pool.session for pool in pools]
    assert len({session.welcome.owner for session in sessions if session is not None}) == 1
    assert sessions[0] is not None
    assert sessions[0].welcome.num_bytes == 5 * (2 << 20)
    pools[0].close()
    time.sleep(2.0)  # longer than it stays without any
    assert path.exists()
    pages = pools[1].allocate(2)
    assert pages is not None
    pools[1].release(pages)
    pools[1].close()
    wait_for(lambda: not path.exists())
    assert "of host memory at" in Path(f"{path}.log").read_text()


def parents() -> dict[int, int]:
    """By process, its parent, of all that there are."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            number, _, rest = stat.read_text().partition(" (")
            found[int(number)] = int(rest.rpartition(") ")[2].split()[1])
    return found


def descendants(process: int) -> set[int]:
    children, found, last = parents(), set[int](), {process}
    while last:
        last = {child for child, parent in children.items() if parent in last}
        found |= last
    return found


def test_an_owner_that_an_engine_starts_is_no_child_of_it_so_that_it_lives_when_engines_kill_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "LINGER_S", 1.0)
    path = tmp_path / "host.sock"
    pool = opened(path, 0.01)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(path))
        owner, _ = peer_of(line)
    assert owner in parents()
    assert owner not in descendants(os.getpid())
    assert os.getsid(owner) == owner, "of a session of its own"
    pool.close()
    wait_for(lambda: not path.exists())


def test_whether_an_owner_has_ended_is_seen_though_it_is_no_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "LINGER_S", 1.0)
    path = tmp_path / "host.sock"
    starter = OwnerStarter(str(path), 0.01)
    assert not starter.has_ended()
    with closing(starter):
        starter.start()
        starter.start()
        wait_for(path.exists)
        assert not starter.has_ended()
        wait_for(starter.has_ended)
    assert not path.exists()


def test_a_launcher_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "_LAUNCH", "import nothing_of_this_name")
    with pytest.raises(
        ConfigError, match=r"cannot start an owner: its launcher ended with 1, and .*\.log says"
    ):
        opened(tmp_path / "host.sock", 0.01)
    assert "nothing_of_this_name" in (tmp_path / "host.sock.log").read_text()


def test_a_log_that_is_a_link_is_not_written(tmp_path: Path) -> None:
    aim = tmp_path / "file"
    aim.write_text("of the user")
    (tmp_path / "host.sock.log").symlink_to(aim)
    with pytest.raises(ConfigError, match=r"cannot start an owner: .*symbolic links.*host\.sock\.log"):
        opened(tmp_path / "host.sock", 0.01)
    assert aim.read_text() == "of the user"


def test_an_owner_that_cannot_start_is_a_refusal_that_names_its_log(tmp_path: Path) -> None:
    path = tmp_path / "host.sock"
    with pytest.raises(ConfigError, match=r"one was started, and .*host\.sock\.log says why"):
        opened(path, 1e6)
    assert "--size: got" in Path(f"{path}.log").read_text()
    with pytest.raises(ConfigError, match=r"cannot start an owner: .*No such file"):
        opened(tmp_path / "nowhere" / "host.sock", 0.01)


def test_an_owner_ends_when_nobody_has_been_connected_for_long_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "host.sock"
    address = Address(str(path))
    server = Server(address, Memory(make_memory(4096), 4096), linger_s=1.0)
    thread = threading.Thread(target=server.serve)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(path))  # before it serves: it is never alone until this ends
        thread.start()
        thread.join(1.5)
        assert thread.is_alive()
    thread.join()
    address.close()


class Loser(OwnerStarter):
    """Starts an owner that ends at once, as another engine's was faster."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), 0.01)
        self.starts = 0

    def start(self) -> None:
        self.starts += 1

    def has_ended(self) -> bool:
        return self.starts > 0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "FIRST_HELLO_S", 1.0)


def waiting(path: Path, starter: OwnerStarter, patience_s: float) -> Session:
    return wait_for_owner(str(path), Hello(4096), LONG_S, lambda: None, patience_s, starter)


@pytest.mark.usefixtures("impatient")
def test_an_owner_that_listens_is_waited_for_while_it_takes_its_memory_by_those_too_that_started_another(
    tmp_path: Path,
) -> None:
    path = tmp_path / "host.sock"
    starter = Loser(path)
    with ThreadPoolExecutor(1) as threads:
        session = threads.submit(waiting, path, starter, 60.0)
        wait_for(lambda: starter.starts > 0)
        address = Address(str(path))
        time.sleep(3.0)  # longer than a hello, and than nobody may listen
        assert not session.done()
        server = Server(address, Memory(make_memory(4096), 4096))
        thread = threading.Thread(target=server.serve)
        thread.start()
        opened_session = session.result()
    assert opened_session.welcome.num_bytes == 4096
    assert server.status()["clients"] == 1
    assert server.status()["clients_leaving"] == 0, "one hello, which was waited for"
    opened_session.connection.close()
    opened_session.connection.release()
    server.stop()
    thread.join()
    address.close()


@pytest.mark.usefixtures("impatient")
def test_an_owner_whose_queue_of_connections_is_full_is_one_that_starts(tmp_path: Path) -> None:
    path = tmp_path / "host.sock"
    address, starter = Address(str(path)), Loser(path)
    address.socket.listen(0)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(path))
        with pytest.raises(ConfigError, match="temporarily unavailable; its owner listens"):
            waiting(path, starter, 1.0)
    assert not starter.starts
    address.close()


@pytest.mark.usefixtures("impatient")
def test_an_owner_that_fails_while_it_takes_its_memory_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "host.sock"
    starter = Loser(path)
    with ThreadPoolExecutor(1) as threads:
        session = threads.submit(waiting, path, starter, 600.0)
        wait_for(lambda: starter.starts > 0)
        address = Address(str(path))
        time.sleep(1.0)
        address.close()
        with pytest.raises(ConfigError, match=r"one was started, and .*host\.sock\.log says why"):
            session.result()


@pytest.mark.usefixtures("impatient")
def test_an_owner_that_never_answers_is_reported_as_one_that_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wait_log, "FIRST_S", 0.1)
    path = tmp_path / "host.sock"
    address = Address(str(path))
    with pytest.raises(ConfigError, match="its owner listens but is stopped, or has not taken all"):
        waiting(path, Loser(path), 0.1)
    address.close()
    (line,) = [line for line in caplog.messages if "has not answered for 0 s: it is stopped" in line]
    assert str(path) in line


def test_that_an_owner_is_waited_for_is_logged_soon_and_then_every_half_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    waits = WaitLog("/run/host.sock", lambda: now)
    for now in (0.5, 1.0, 20.0, 30.9, 31.0, 60.0, 61.5):
        waits.note(300.0 - now)
    assert [line.partition(" for ")[2].partition(":")[0] for line in caplog.messages] == [
        "1 s",
        "31 s",
        "62 s",
    ]
    assert waits.left() == 30.0
    assert "waits for 299 s more" in caplog.messages[0]


def test_more_memory_is_waited_for_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def note(*args: object) -> Session:
        waits.append(float(str(args[4])))
        raise ConfigError("nobody")

    monkeypatch.setattr(opening, "wait_for_owner", note)
    for gib in (1.0, 500.0):
        with pytest.raises(ConfigError, match="nobody"):
            opened(tmp_path / "host.sock", gib)
    assert waits[0] >= opening.OWN_START_S
    assert waits[1] - waits[0] >= 499 * opening.GIB_START_S
