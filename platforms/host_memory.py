"""Aligned host memory whose end can be noticed."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

import numpy as np
import torch

PAGE_BYTES = 4096

_Byte = ctypes.c_ubyte * 1


def allocate_aligned(nbytes: int) -> tuple[torch.Tensor, np.ndarray]:
    """Allocate an uint8 CPU tensor, (nbytes,), that starts on a memory page, and the array under it."""
    memory = np.empty(nbytes + PAGE_BYTES - 1, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    array = memory[start : start + nbytes]
    return torch.from_numpy(array), array


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
