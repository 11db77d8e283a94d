"""Aligned host memory whose end can be noticed."""

from __future__ import annotations

import ctypes
import errno
import weakref
from collections.abc import Callable

import numpy as np
import torch

PAGE_BYTES = 4096
HUGE_BYTES = 2 << 20
# Of linux/mman.h; POPULATE_WRITE came with Linux 5.14.
_HUGEPAGE, _POPULATE_WRITE = 14, 23

_Byte = ctypes.c_ubyte * 1


def allocate_aligned(nbytes: int) -> tuple[torch.Tensor, np.ndarray]:
    """Allocate an uint8 CPU tensor, (nbytes,), that starts on a memory page, and the array under it."""
    memory = np.empty(nbytes + PAGE_BYTES - 1, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    array = memory[start : start + nbytes]
    return torch.from_numpy(array), array


def populate(array: np.ndarray) -> None:
    """Have the system give every memory page of `array` now, huge ones where it has them; for unused memory.

    Page-locking gives them too, but meanwhile the driver is held up, and with it all launches: measured on an
    H200, launches beside page-locking took 8 ms at the median, and as ever beside memory given before.
    """
    first = -(-array.ctypes.data // PAGE_BYTES) * PAGE_BYTES
    num_bytes = array.ctypes.data + array.nbytes - first
    ask_for_huge_pages(first, num_bytes)
    if give(first, num_bytes) == errno.EINVAL:
        # An older system. Where there is no memory, page-locking fails as well, and the pool goes on with
        # what it has: to write to it would have the system end the process.
        ctypes.memset(array.ctypes.data, 0, array.nbytes)


def ask_for_huge_pages(address: int, num_bytes: int) -> bool:
    """Have the system take huge pages for memory that it has not given yet; False where it has none.

    They need memory that begins at a multiple of HUGE_BYTES.
    """
    return _advise(address, num_bytes, _HUGEPAGE) == 0


def give(address: int, num_bytes: int) -> int:
    """Have the system give all memory pages of a range now, as a write would; 0, or the error's number.

    That is EINVAL where the system cannot. Other threads of Python go on meanwhile.
    """
    return _advise(address, num_bytes, _POPULATE_WRITE)


def _advise(address: int, num_bytes: int, advice: int) -> int:
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes, advise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return ctypes.get_errno() if advise(address, num_bytes, advice) else 0


def call_at_end(array: np.ndarray, work: Callable[[object], object]) -> None:
    """Call `work` with the memory of `array` when the last tensor over it is gone; kept, it stays.

    It may be any thread, in the middle of anything: `work` takes no lock, and nothing of the thread's own.
    """
    # At exit tensors are still in use, and the process takes its memory with it.
    weakref.finalize(array, work, array.base).atexit = False


def is_byte_pinned(address: int) -> bool:
    """Whether torch's current accelerator has the host memory at `address` page-locked."""
    # torch looks up where a tensor's storage begins, not the tensor; so the byte gets a storage of its own.
    return torch.frombuffer(_Byte.from_address(address), dtype=torch.uint8).is_pinned()


def check_size(nbytes: int) -> None:
    """Raise ValueError unless `nbytes` is positive."""
    if nbytes <= 0:
        raise ValueError(f"got {nbytes} bytes of page-locked memory to allocate; ask for at least 1")


def no_memory(nbytes: int) -> MemoryError:
    """Make the error of a page-locked allocation that failed."""
    return MemoryError(
        f"cannot page-lock {nbytes} bytes ({nbytes / 2**30:.2f} GiB) of host memory (not device memory): "
        "lower max_local_cpu_size, or raise the locked-memory limit (ulimit -l, or the container's memory)"
    )
