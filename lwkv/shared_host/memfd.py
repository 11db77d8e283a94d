"""Memory that processes share by a descriptor: it has no name, and is gone with the last who maps it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import torch

from lwkv.errors import ConfigError
from lwkv.shared_host.mapping import give_by_threads, huge_bytes, map_memory
from lwkv.shared_host.numa import NodeShare, bytes_by_node

# Of linux/fcntl.h. Python has them only where it was built with them.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEALS = 1 | 2 | 4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW


def make_memory(num_bytes: int, huge_pages: bool = False) -> int:
    """Make `num_bytes` bytes of sealed memory, none of which is there before `fill`; returns its descriptor.

    Args:
        huge_pages: from those of 2 MiB that the system has set aside; `num_bytes` is a multiple of that then.

    Raises:
        ConfigError: the system does not give it.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB if huge_pages else 0
    try:
        descriptor = os.memfd_create("lwkv-host", flags)
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS)
    except OSError as error:
        what = " of huge pages" if huge_pages else ""
        raise ConfigError(f"cannot make {num_bytes} bytes{what} of shared memory: {error}") from error
    return descriptor


def is_sealed(descriptor: int) -> bool:
    """Whether memory can neither shrink nor grow: to read behind its end would end the process."""
    with suppress(OSError):
        return fcntl.fcntl(descriptor, _GET_SEALS) & _SEALS == _SEALS
    return False


class Filled(NamedTuple):
    """How much of a memory is in huge pages, and on each NUMA node where there are several.

    `shares` were filled near their nodes.
    """

    huge_bytes: int
    by_node: Mapping[int, int]
    shares: Sequence[NodeShare] = ()


def fill(descriptor: int, num_bytes: int, num_threads: int, shares: Sequence[NodeShare] = ()) -> Filled:
    """Have the system give all of the memory now, huge pages where it has them, by some threads.

    Args:
        shares: of the NUMA nodes, all of the memory; each is filled by threads on its node, which have memory
            near them where there is some. Without them it is wherever the threads happen to run.

    Raises:
        ConfigError: it does not have as much.
    """
    memory = map_memory(descriptor, num_bytes)
    failure = _fill_shares(memory, num_threads, shares) if shares else give_by_threads(memory, num_threads)
    if failure == errno.EINVAL:  # before Linux 5.14
        shares, failure = (), _allocate(descriptor, num_bytes)
    if failure:
        raise ConfigError(
            f"the system does not have {num_bytes / 2**30:.2f} GiB for shared memory: "
            f"{os.strerror(failure)}; lower --size, or give the container more"
        )
    return Filled(huge_bytes(memory), bytes_by_node(memory) if shares else {}, shares)


def _fill_shares(memory: torch.Tensor, num_threads: int, shares: Sequence[NodeShare]) -> int:
    """Returns 0, or the number of the first error."""
    each = max(1, num_threads // len(shares))

    def fill_one(share: NodeShare) -> int:
        return give_by_threads(memory[share.first : share.end], each, share.node.processors)

    with ThreadPoolExecutor(len(shares)) as threads:
        return next(filter(None, threads.map(fill_one, shares)), 0)


def _allocate(descriptor: int, num_bytes: int) -> int:
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        return error.errno or errno.ENOMEM
    return 0
