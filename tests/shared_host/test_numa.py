"""An owner's memory on the nodes of a machine: the topology is made up, in a folder as the system has it."""

from __future__ import annotations

import argparse
import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from shared_host.owners import session_at
from shared_host.workers import status

from lwkv.cli import host
from lwkv.shared_host import mapping, numa
from lwkv.shared_host.client.connecting import connect
from lwkv.shared_host.client.keeper import Waker
from lwkv.shared_host.greeting import Hello
from lwkv.shared_host.memfd import fill, make_memory
from lwkv.shared_host.numa import (
    UNKNOWN,
    Node,
    NodeShare,
    bytes_by_node,
    node_of,
    node_of_processors,
    on_nodes,
    read_nodes,
    spread,
)
from lwkv.shared_host.owner.address import Address
from lwkv.shared_host.owner.free_pages import FreePages
from lwkv.shared_host.owner.index import NodeIndex
from lwkv.shared_host.owner.server import Memory, Server
from lwkv.shared_host.owner.slabs import SlabOwners
from lwkv.shared_host.protocol import Message, Op, pack_numbers, read_numbers

TWO = [Node(0, frozenset({0, 1})), Node(1, frozenset({2, 3}))]
ANY_SIZE = 1 << 40


def make_node(folder: Path, number: int, processors: str, kib: int = 1000) -> None:
    node = folder / f"node{number}"
    node.mkdir()
    (node / "cpulist").write_text(processors + "\n")
    (node / "meminfo").write_text(f"Node {number} MemTotal:       {kib} kB\nNode {number} MemFree: 5 kB\n")


def test_nodes_are_those_with_memory_and_processors_that_may_be_used(tmp_path: Path) -> None:
    make_node(tmp_path, 10, "0-1,4")
    make_node(tmp_path, 2, "2-3")
    make_node(tmp_path, 3, "", kib=1000)  # memory that is near no processor
    make_node(tmp_path, 4, "5", kib=0)
    make_node(tmp_path, 5, "6-7")
    (tmp_path / "node6").mkdir()
    assert read_nodes(tmp_path, range(6)) == [Node(2, frozenset({2, 3})), Node(10, frozenset({0, 1, 4}))]
    assert read_nodes(tmp_path / "nowhere", range(6)) == []


def test_the_system_s_own_nodes_have_processors_of_this_process() -> None:
    for node in read_nodes():
        assert node.processors <= os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("num_bytes", "ends"), [(800, [400, 800]), (950, [500, 950]), (50, [50]), (250, [100, 250])]
)
def test_nodes_have_as_many_whole_slabs_each(num_bytes: int, ends: list[int]) -> None:
    shares = spread(num_bytes, 100, TWO)
    assert [share.end for share in shares] == ends
    assert [share.first for share in shares] == [0, *ends[:-1]]


def test_memory_is_not_spread_where_there_is_one_node() -> None:
    assert spread(800, 100, TWO[:1]) == []
    assert node_of_processors(TWO[:1], {0}) == UNKNOWN
    assert node_of(torch.device("cpu"), TWO[:1]) == UNKNOWN


def test_the_node_of_a_process_is_that_of_its_processors() -> None:
    assert node_of_processors(TWO, {2}) == 1
    assert node_of_processors(TWO, {1, 2}) == UNKNOWN
    assert node_of_processors(TWO, ()) == UNKNOWN


def test_the_node_of_a_client_is_that_of_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = tmp_path / "0000:1b:00.0"
    bus.mkdir()
    (bus / "numa_node").write_text("1\n")
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    module = SimpleNamespace(get_device_properties=lambda device: place)
    monkeypatch.setattr(torch, "xpu", module)
    device = torch.device("xpu", 0)
    assert node_of(device, TWO, tmp_path) == 1
    (bus / "numa_node").write_text("-1\n")  # as virtual machines say
    near_all = [Node(0, frozenset(os.sched_getaffinity(0))), Node(1, frozenset({1 << 20}))]
    assert node_of(device, near_all, tmp_path) == 0
    module.get_device_properties = lambda device: SimpleNamespace()
    assert node_of(device, near_all, tmp_path) == 0
    assert node_of(torch.device("cpu"), near_all, tmp_path) == 0


def test_each_part_is_given_by_threads_on_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[int, set[int]] = {}
    real = mapping.give

    def note(address: int, num_bytes: int) -> int:
        given[address] = os.sched_getaffinity(0)
        return real(address, num_bytes)

    monkeypatch.setattr(mapping, "give", note)
    before = sorted(os.sched_getaffinity(0))
    nodes = [Node(0, frozenset(before[:1])), Node(1, frozenset(before[-1:]))]
    size = 4 << 20
    descriptor = make_memory(size)
    filled = fill(descriptor, size, 2, spread(size, 2 << 20, nodes))
    os.close(descriptor)
    assert [on for _, on in sorted(given.items())] == [set(before[:1]), set(before[-1:])]
    assert sorted(os.sched_getaffinity(0)) == before
    assert sum(filled.by_node.values()) in (0, size)  # 0 where the system does not say


def test_memory_that_no_thread_of_a_node_gave_is_said_to_be_near_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on systems before Linux 5.14: the memory is there, and nothing of it is mapped."""
    monkeypatch.setattr(mapping, "give", lambda address, num_bytes: errno.EINVAL)
    processors = frozenset(os.sched_getaffinity(0))
    size = 4 << 20
    descriptor = make_memory(size)
    filled = fill(descriptor, size, 2, spread(size, 2 << 20, [Node(0, processors), Node(1, processors)]))
    assert (filled.by_node, filled.shares) == ({}, ())
    assert bytes_by_node(mapping.map_memory(descriptor, size)) == {}
    os.close(descriptor)


def test_where_memory_is_can_be_seen_and_is_said() -> None:
    descriptor = make_memory(2 << 20)
    fill(descriptor, 2 << 20, 1)
    memory = mapping.map_memory(descriptor, 2 << 20)
    mapping.give_by_threads(memory, 1, {1 << 20})  # no such processor: the thread runs on any
    assert sum(bytes_by_node(memory).values()) in (0, 2 << 20)
    assert bytes_by_node(torch.zeros(0)) == {}
    os.close(descriptor)
    assert on_nodes({1: 1 << 30, 0: 3 << 29}) == "by NUMA node: 1.50 GiB on node 0, 1.00 GiB on node 1"


def reserved(index: NodeIndex, node: int, count: int, end: int = ANY_SIZE) -> list[int]:
    """Pages that a new client of a node gets."""
    parts = [pack_numbers([end]), pack_numbers([count])]
    answer = index.handle(index.client(node), Message(Op.RESERVE, 1, parts))
    assert answer is not None
    pages: list[int] = read_numbers(answer[0]).tolist()
    return pages


def make_index() -> NodeIndex:
    """Six slabs of two pages, the first three on node 0, the others on node 1."""
    slabs = SlabOwners(600, 100, spread(600, 100, TWO))
    return NodeIndex(*slabs.pages_of(50), slabs)


def test_a_client_gets_pages_of_its_own_node_first_and_then_all_others() -> None:
    index = make_index()
    assert reserved(index, 1, 3) == [6, 7, 8]
    assert reserved(index, 0, 1) == [0]
    assert reserved(index, UNKNOWN, 1) == [1]
    assert reserved(index, 1, 5) == [9, 10, 11, 2, 3]
    assert reserved(index, 1, 3) == []
    assert reserved(index, 1, 2) == [4, 5]


def test_no_page_is_given_that_the_client_cannot_use_yet() -> None:
    index = make_index()
    assert reserved(index, 1, 2, end=4) == [0, 1]
    assert reserved(index, 1, 3, end=8) == [6, 7, 2]
    assert reserved(index, 7, 1) == [3]


def test_pages_that_are_near_are_taken_in_long_runs() -> None:
    free = FreePages(12, 12, 12)
    assert free.take(12, 12) is not None
    for pages in ([0, 1, 2, 3], [6], [8, 9], [11]):
        free.give(torch.tensor(pages).numpy())
    assert taken(free, 2, (6, 12)) == [8, 9]
    assert taken(free, 4, (6, 12)) == [6, 11, 0, 1]


def taken(free: FreePages, count: int, near: tuple[int, int]) -> list[int]:
    pages = free.take(count, 12, near)
    assert pages is not None
    found: list[int] = pages.tolist()
    return found


def test_the_owner_takes_the_node_of_a_client_and_says_where_its_memory_is(tmp_path: Path) -> None:
    path, size = tmp_path / "host.sock", 4 * 8192
    address, descriptor = Address(str(path)), make_memory(size)
    server = Server(address, Memory(descriptor, size, spread(size, 8192, TWO), {0: 5, 1: 7}), 8192)
    thread = threading.Thread(target=server.serve)
    thread.start()
    session = connect(str(path), Hello(4096, node=1), 30.0, Waker())
    other = session_at(path)
    for client, first in ((session, 4), (other, 0)):
        pages, _ = client.reserve(8, 2)
        assert pages is not None
        assert pages.tolist() == [first, first + 1]
    assert {name: n for name, n in status(path).items() if name.startswith(numa.ON_NODE)} == {
        "bytes_on_node_0": 5,
        "bytes_on_node_1": 7,
    }
    for client in (session, other):
        client.connection.close()
        client.connection.release()
    server.stop()
    thread.join()
    address.close()
    os.close(descriptor)


def test_the_command_spreads_its_memory_over_the_nodes_and_logs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Sequence[NodeShare]] = []

    class Ended:
        def __init__(self, address: Address, memory: Memory, linger_s: float | None) -> None:
            seen.append(memory.shares)

        def stop(self) -> None: ...

        def serve(self) -> None: ...

    processors = sorted(os.sched_getaffinity(0))
    nodes = [Node(0, frozenset(processors[:1])), Node(1, frozenset(processors[-1:]))]
    monkeypatch.setattr(host, "Server", Ended)
    monkeypatch.setattr(host, "SLAB_BYTES", 2 << 20)
    monkeypatch.setattr(host, "read_nodes", lambda: nodes)
    monkeypatch.setattr(host.signal, "signal", lambda *_: None)
    monkeypatch.setattr("lwkv.shared_host.memfd.bytes_by_node", lambda memory: {0: 2 << 20, 1: 2 << 20})
    caplog.set_level("INFO")
    options = argparse.Namespace(
        size=4 / 1024, socket=str(tmp_path / "host.sock"), huge_pages=False, linger=None, threads=2
    )
    assert host.run(options) == 0
    assert [share.end for share in seen[0]] == [2 << 20, 4 << 20]
    assert any("by NUMA node: 0.00 GiB on node 0, 0.00 GiB on node 1" in line for line in caplog.messages)
