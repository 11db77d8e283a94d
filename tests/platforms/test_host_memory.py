"""Host memory that the system gives at once."""

from __future__ import annotations

import ctypes
import errno
import mmap
from types import SimpleNamespace

import numpy as np
import pytest

from lwkv.platforms.host_memory import PAGE_BYTES, allocate_aligned, populate


def resident_pages(array: np.ndarray) -> int:
    """How many memory pages of `array` the system has given."""
    seen = (ctypes.c_ubyte * (array.nbytes // PAGE_BYTES))()
    call = ctypes.CDLL(None, use_errno=True).mincore
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert call(array.ctypes.data, len(seen) * PAGE_BYTES, seen) == 0
    return sum(page & 1 for page in seen)


@pytest.mark.parametrize("num_pages", [1, 7, 1025])
def test_populated_memory_is_there_as_a_whole(num_pages: int) -> None:
    array = np.frombuffer(mmap.mmap(-1, num_pages * PAGE_BYTES), np.uint8)
    assert resident_pages(array) == 0
    populate(array)
    assert resident_pages(array) == num_pages


@pytest.mark.parametrize("nbytes", [1, 4095, 4097, (2 << 20) + 5])
def test_memory_of_any_size_can_be_populated_and_written(nbytes: int) -> None:
    memory, array = allocate_aligned(nbytes)
    populate(array)
    memory.fill_(7)
    assert (memory == 7).all()


class Failing:
    """A system whose `madvise` gives nothing, for the reason that the test says."""

    def __init__(self, reason: int) -> None:
        self._reason = reason

    def __call__(self, address: int, num_bytes: int, advice: int) -> int:
        ctypes.set_errno(self._reason)
        return -1


@pytest.mark.parametrize(("reason", "is_written"), [(errno.EINVAL, True), (errno.ENOMEM, False)])
def test_memory_is_written_to_where_the_system_is_older_and_not_where_it_has_none_left(
    reason: int, is_written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(madvise=Failing(reason)))
    _, array = allocate_aligned(PAGE_BYTES)
    array[:] = 7
    populate(array)
    assert bool((array == 0).all()) == is_written
