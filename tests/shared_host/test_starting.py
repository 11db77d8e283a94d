"""An owner that the first engine starts: one for all, which ends when nobody uses it any more."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from shared_host.owners import LONG_S
from shared_host.workers import wait_for

from lwkv.errors import ConfigError
from lwkv.platforms.cpu import CPU
from lwkv.shared_host.client import starting
from lwkv.shared_host.client.opening import open_node_memory
from lwkv.shared_host.client.pool import NodePool
from lwkv.shared_host.memfd import make_memory
from lwkv.shared_host.owner.address import Address
from lwkv.shared_host.owner.server import Memory, Server
from lwkv.telemetry.counters import Counters


def opened(path: Path, gib: float) -> NodePool:
    pool, _ = open_node_memory(str(path), CPU(), 4096, LONG_S, Counters(), start_gib=gib)
    return pool


def test_engines_that_start_at_once_have_one_owner_which_ends_after_the_last_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "LINGER_S", 4.0)
    path = tmp_path / "host.sock"
    with ThreadPoolExecutor(2) as threads:
        pools = list(threads.map(lambda _: opened(path, 0.01), range(2)))
    sessions = [pool.session for pool in pools]
    assert len({session.welcome.owner for session in sessions if session is not None}) == 1
    assert sessions[0] is not None
    assert sessions[0].welcome.num_bytes == 5 * (2 << 20)
    pools[0].close()
    time.sleep(4.5)  # longer than it stays without any
    assert path.exists()
    pages = pools[1].allocate(2)
    assert pages is not None
    pools[1].release(pages)
    pools[1].close()
    wait_for(lambda: not path.exists())
    for process in starting._started:
        process.wait(60)
    assert "of host memory at" in Path(f"{path}.log").read_text()


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
