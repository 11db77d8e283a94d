"""How shared memory is mapped: where huge pages can be, and all of it there before it is used."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch

from lwkv.platforms.host_memory import HUGE_BYTES, ask_for_huge_pages, give

GIVE_BYTES = 32 << 20
"""What one thread has the system give at a time."""

_NO_ACCESS, _FIXED, _NO_RESERVE = 0, 0x10, 0x4000  # of linux/mman.h
HUGE_LINES = ("ShmemPmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:")
_FAILED = ctypes.c_void_p(-1).value


def map_memory(descriptor: int, num_bytes: int) -> torch.Tensor:
    """Map shared memory as uint8, (num_bytes,), until nobody has the tensor.

    It begins at a multiple of HUGE_BYTES: elsewhere no process maps huge pages, and the first one, which has
    the system give the memory, would get none. Whoever maps it asks for them, too.

    Raises OSError, or ValueError where the memory is smaller.
    """
    if (size := os.fstat(descriptor).st_size) < num_bytes:
        raise ValueError(f"the memory has {size} bytes, and {num_bytes} were to be mapped")
    room = num_bytes + HUGE_BYTES
    reserved = _map(None, room, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE, -1)
    start = -(-reserved // HUGE_BYTES) * HUGE_BYTES
    # A forked child has it, too: it is not copied on a write, and were it kept out of the child, the end of
    # the child's tensor would unmap whatever has that address there.
    try:
        _map(start, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, descriptor)
    except OSError:
        _unmap(reserved, room)
        raise
    ask_for_huge_pages(start, num_bytes)
    memory = np.ctypeslib.as_array((ctypes.c_ubyte * num_bytes).from_address(start))
    # At exit tensors are still in use, and the process takes its memory with it.
    weakref.finalize(memory, _unmap, reserved, room).atexit = False
    return torch.from_numpy(memory)


def give_by_threads(memory: torch.Tensor, num_threads: int, processors: Collection[int] = ()) -> int:
    """Have the system give all of `memory`, uint8 (bytes,), which begins at a memory page; see `give`.

    What another process was given is mapped only. Returns 0, or the number of the first error.

    Args:
        processors: those that the threads run on, any where there are none: the system gives memory that is
            near whoever asks for it, where there is some.
    """
    start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    parts = [(first, min(GIVE_BYTES, end - first)) for first in range(start, end, GIVE_BYTES)]
    with ThreadPoolExecutor(
        min(num_threads, len(parts)), initializer=_run_on, initargs=(processors,)
    ) as threads:
        return next(filter(None, threads.map(lambda part: give(*part), parts)), 0)


def _run_on(processors: Collection[int]) -> None:
    """Have this thread run on some processors only, if it may."""
    if processors:
        with suppress(OSError):
            os.sched_setaffinity(0, processors)


def huge_bytes(memory: torch.Tensor) -> int:
    """How many bytes of a mapping, all of `memory`, are in huge pages here; 0 where that cannot be seen."""
    begin, is_inside, found = f"{memory.data_ptr():x}-", False, 0
    with suppress(OSError), open("/proc/self/smaps") as lines:
        for line in lines:
            if line[0] in "0123456789abcdef":
                is_inside = line.startswith(begin)
            elif is_inside and line.startswith(HUGE_LINES):
                found += 1024 * int(line.split()[1])
    return found


def _map(address: int | None, num_bytes: int, access: int, flags: int, descriptor: int) -> int:
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong)
    start: int | None = call(address, num_bytes, access, flags, descriptor, 0)
    if start is None or start == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return start


def _unmap(address: int, num_bytes: int) -> None:
    call = ctypes.CDLL(None).munmap
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    call(address, num_bytes)
