"""The NUMA nodes of a machine: which memory is near which processors, and how an owner's memory is spread."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

SYSTEM = Path("/sys/devices/system/node")
BUSES = Path("/sys/bus/pci/devices")
UNKNOWN = -1
"""The node of whoever has none, or is not known to have one."""

ON_NODE = "bytes_on_node_"
"""In an owner's status, names begin with this that end with the number of a node."""


class Node(NamedTuple):
    """A node with memory, and the processors near it that this process may run on."""

    number: int
    processors: frozenset[int]


class NodeShare(NamedTuple):
    """Bytes [first, end) of an owner's memory, which are near `node`."""

    node: Node
    first: int
    end: int


def read_nodes(folder: Path = SYSTEM, allowed: Collection[int] | None = None) -> list[Node]:
    """The nodes that have memory and processors, by number; none where the system does not say.

    Args:
        folder: as /sys/devices/system/node.
        allowed: processors that this process may run on; those of the system by default.
    """
    usable = os.sched_getaffinity(0) if allowed is None else allowed
    nodes = []
    for path in folder.glob("node[0-9]*"):
        processors = frozenset(_read_list(path / "cpulist")).intersection(usable)
        if processors and _has_memory(path / "meminfo"):
            nodes.append(Node(int(path.name.removeprefix("node")), processors))
    return sorted(nodes)


def spread(num_bytes: int, slab_bytes: int, nodes: Sequence[Node]) -> list[NodeShare]:
    """Give each node as many whole slabs as the others, or one less; nothing for less than two nodes."""
    if len(nodes) < 2:
        return []
    slabs = -(-num_bytes // slab_bytes)
    ends = [min(slabs * (i + 1) // len(nodes) * slab_bytes, num_bytes) for i in range(len(nodes))]
    shares = map(NodeShare, nodes, [0, *ends[:-1]], ends)
    return [share for share in shares if share.first < share.end]


def node_of_processors(nodes: Sequence[Node], processors: Collection[int]) -> int:
    """The node that has all of these processors; UNKNOWN where they are on several."""
    found = [node.number for node in nodes if node.processors.issuperset(processors)]
    return found[0] if len(nodes) > 1 and found and processors else UNKNOWN


def on_nodes(by_node: Mapping[int, int]) -> str:
    """How much is on each node, for people."""
    sizes = [f"{num_bytes / 2**30:.2f} GiB on node {number}" for number, num_bytes in sorted(by_node.items())]
    return f"by NUMA node: {', '.join(sizes)}"


def node_of(device: torch.device, nodes: Sequence[Node] | None = None, buses: Path = BUSES) -> int:
    """The node whose memory a client is to have first, UNKNOWN where there is no such.

    That is the node of its device, or else the one that has all processors this process may run on.

    Args:
        nodes, buses: of the system by default.
    """
    nodes = read_nodes() if nodes is None else nodes
    if len(nodes) < 2:
        return UNKNOWN
    number = _node_on_bus(device, buses)
    return number if number != UNKNOWN else node_of_processors(nodes, os.sched_getaffinity(0))


def _node_on_bus(device: torch.device, buses: Path) -> int:
    module = getattr(torch, device.type, None)
    with suppress(AttributeError, AssertionError, OSError, RuntimeError, ValueError):
        # Not every torch, and not every device module, says where a device is.
        found: Any = module.get_device_properties(device)  # type: ignore[union-attr]
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        return int((buses / address / "numa_node").read_text())
    return UNKNOWN


def bytes_by_node(memory: torch.Tensor) -> dict[int, int]:
    """How much of a mapping, all of `memory`, is on each node.

    Nothing where the system does not say, or nothing of it is mapped yet.
    """
    begin = f"{memory.data_ptr():x} "
    with suppress(KeyError, OSError, ValueError), open("/proc/self/numa_maps") as lines:
        for line in lines:
            if line.startswith(begin):
                values = dict(word.partition("=")[::2] for word in line.split())
                size = int(values["kernelpagesize_kB"]) << 10
                return {
                    int(name[1:]): int(value) * size
                    for name, value in values.items()
                    if name[0] == "N" and name[1:].isdigit()
                }
    return {}


def _read_list(path: Path) -> list[int]:
    """Numbers as the system lists them: 0-3,8,10-11. None where there is no such file."""
    with suppress(OSError, ValueError):
        parts = [part.partition("-") for part in path.read_text().strip().split(",") if part]
        return [n for first, _, last in parts for n in range(int(first), int(last or first) + 1)]
    return []


def _has_memory(path: Path) -> bool:
    with suppress(OSError, ValueError, StopIteration):
        total = next(line for line in path.read_text().splitlines() if "MemTotal:" in line)
        return int(total.split()[-2]) > 0
    return False
