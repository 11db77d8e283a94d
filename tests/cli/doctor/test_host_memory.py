"""What the doctor says of a node's memory."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from shared_host.owners import owner_at, pool_at

from lwkv.cli.doctor.memory import examine_memory
from lwkv.cli.doctor.report import Report
from lwkv.config.settings import Config
from lwkv.shared_host.memfd import make_memory
from lwkv.shared_host.owner.address import Address
from lwkv.shared_host.owner.server import Memory, Server


def test_the_owner_of_host_memory_is_asked_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "host.sock"
    report = Report({})
    with owner_at(path, 16, 1 << 20), pool_at(path, (1 << 20) - 5) as pool:
        pages = pool.allocate(4)
        assert pages is not None
        examine_memory(report, Config(host_memory=str(path)))
    assert report.faults == []
    assert report.memory[f"host_memory {path}"] == "0.02 GiB, 0.00 GiB in use: 0 chunks, 1 engines"
    assert "max_local_cpu_size" not in report.memory


def test_it_is_said_on_which_nodes_the_memory_is(tmp_path: Path) -> None:
    path, size = tmp_path / "host.sock", 4096
    address, descriptor = Address(str(path)), make_memory(size)
    server = Server(address, Memory(descriptor, size, by_node={1: 1 << 30, 0: 3 << 29}))
    thread = threading.Thread(target=server.serve)
    thread.start()
    report = Report({})
    examine_memory(report, Config(host_memory=str(path)))
    server.stop()
    thread.join()
    address.close()
    os.close(descriptor)
    assert report.memory[f"host_memory {path}"].endswith(
        "0 engines; by NUMA node: 1.50 GiB on node 0, 1.00 GiB on node 1"
    )


@pytest.mark.parametrize("there", [False, True])
def test_a_socket_without_an_owner_is_a_fault_with_the_command_that_starts_one(
    tmp_path: Path, there: bool
) -> None:
    path = tmp_path / "host.sock"
    if there:
        path.write_text("no socket")
    report = Report({})
    examine_memory(report, Config(host_memory=str(path)))
    [fault] = report.faults
    assert fault.startswith(f"host_memory={path}: no owner of host memory answers")
    assert fault.endswith(f"start one with: lwkv host --size GIB --socket {path}")


def test_an_owner_that_an_engine_will_start_is_no_fault(tmp_path: Path) -> None:
    report = Report({})
    path = str(tmp_path / "host.sock")
    examine_memory(report, Config(host_memory=path, extra_config={"host_memory_gib": 2.5}))
    assert report.faults == []
    assert report.memory[f"host_memory {path}"] == "no owner: the first engine starts one of 2.5 GiB"
