"""Memory that processes share by a descriptor: it has no name, and is gone with the last who maps it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch

from lwkv.errors import ConfigError

HUGE_BYTES = 2 << 20
FILL_BYTES = 256 << 20
# Of linux/mman.h and linux/fcntl.h. Python has the latter only where it was built with them.
_HUGEPAGE, _POPULATE_WRITE = 14, 23
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEALS = 1 | 2 | 4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW


def make_slab(num_bytes: int, huge_pages: bool = False) -> int:
    """Make `num_bytes` bytes of sealed memory, none of which is there before `fill`; returns its descriptor.

    Args:
        huge_pages: from those of 2 MiB that the system has set aside; `num_bytes` is a multiple of that then.

    Raises:
        ConfigError: the system does not give it.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        slab = os.memfd_create("lwkv-host", flags | (os.MFD_HUGETLB | os.MFD_HUGE_2MB if huge_pages else 0))
        os.ftruncate(slab, num_bytes)
        fcntl.fcntl(slab, _ADD_SEALS, _SEALS)
    except OSError as error:
        what = " of huge pages" if huge_pages else ""
        raise ConfigError(f"cannot make {num_bytes} bytes{what} of shared memory: {error}") from error
    return slab


def is_sealed(slab: int) -> bool:
    """Whether memory can neither shrink nor grow: to read behind its end would end the process."""
    with suppress(OSError):
        return fcntl.fcntl(slab, _GET_SEALS) & _SEALS == _SEALS
    return False


def map_slab(slab: int, num_bytes: int) -> torch.Tensor:
    """Map shared memory as uint8, (num_bytes,), until nobody has the tensor.

    Raises OSError, or ValueError where the memory is smaller.
    """
    # A forked child has it, too: it is not copied on a write, and were it kept out of the child, the end of
    # the child's tensor would unmap whatever has that address there.
    return torch.from_numpy(np.frombuffer(mmap.mmap(slab, num_bytes), np.uint8))


def fill(slab: int, num_bytes: int, num_threads: int) -> None:
    """Have the system give all of the memory now, huge pages where it has them, by some threads.

    Raises:
        ConfigError: it does not have as much.
    """
    memory = map_slab(slab, num_bytes)
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes, advise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    advise(memory.data_ptr(), num_bytes, _HUGEPAGE)

    def give(start: int) -> int:
        size = min(FILL_BYTES, num_bytes - start)
        return ctypes.get_errno() if advise(memory.data_ptr() + start, size, _POPULATE_WRITE) else 0

    with ThreadPoolExecutor(num_threads) as threads:
        failures = [code for code in threads.map(give, range(0, num_bytes, FILL_BYTES)) if code]
    if failures and failures[0] == errno.EINVAL:  # before Linux 5.14
        failures = _allocate(slab, num_bytes)
    if failures:
        raise ConfigError(
            f"the system does not have {num_bytes / 2**30:.2f} GiB for shared memory: "
            f"{os.strerror(failures[0])}; lower --size, or give the container more"
        )


def _allocate(slab: int, num_bytes: int) -> list[int]:
    try:
        os.posix_fallocate(slab, 0, num_bytes)
    except OSError as error:
        return [error.errno or errno.ENOMEM]
    return []
