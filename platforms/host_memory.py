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
    """Allocate an uint8 CPU tensor, (nbytes,), that starts on a memory page, and the array that owns it."""
    owner = np.empty(nbytes + PAGE_BYTES - 1, np.uint8)
    start = -owner.ctypes.data % PAGE_BYTES
    return torch.from_numpy(owner[start : start + nbytes]), owner


def call_at_end(owner: np.ndarray, work: Callable[[], object]) -> None:
    """Call `work` when the last tensor over `owner` is gone, just before its memory is."""
    # At exit tensors are still in use, and the process takes its memory with it.
    weakref.finalize(owner, work).atexit = False


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
