"""How shared memory is mapped: aligned for huge pages, and right where the system has none."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from lwkv.platforms.host_memory import HUGE_BYTES, PAGE_BYTES
from lwkv.shared_host import mapping
from lwkv.shared_host.mapping import give_by_threads, huge_bytes, map_memory
from lwkv.shared_host.memfd import fill, make_memory

NUM_BYTES = HUGE_BYTES + 3 * PAGE_BYTES


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = make_memory(NUM_BYTES)
    yield descriptor
    os.close(descriptor)


def mapped_lines() -> int:
    with open("/proc/self/maps") as lines:
        return sum("lwkv-host" in line for line in lines)


def given_bytes(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


def test_every_mapping_begins_where_a_huge_page_can(descriptor: int) -> None:
    both = [map_memory(descriptor, NUM_BYTES), map_memory(descriptor, NUM_BYTES)]
    assert [memory.data_ptr() % HUGE_BYTES for memory in both] == [0, 0]
    both[0][-1] = 7
    assert int(both[1][-1]) == 7
    assert [memory.nbytes for memory in both] == [NUM_BYTES, NUM_BYTES]


def test_a_mapping_ends_with_the_last_tensor_over_it(descriptor: int) -> None:
    before = mapped_lines()
    part = map_memory(descriptor, NUM_BYTES)[PAGE_BYTES:]
    assert mapped_lines() == before + 1
    part.fill_(3)
    del part
    assert mapped_lines() == before


def test_memory_that_is_smaller_than_was_said_is_not_mapped(descriptor: int) -> None:
    before = mapped_lines()
    with pytest.raises(ValueError, match=f"has {NUM_BYTES} bytes, and {NUM_BYTES + 1} were"):
        map_memory(descriptor, NUM_BYTES + 1)
    read, write = os.pipe()
    with pytest.raises(OSError, match="Invalid argument"):
        map_memory(read, 0)
    os.close(read)
    os.close(write)
    assert mapped_lines() == before


@pytest.mark.parametrize("num_threads", [1, 3])
def test_all_of_it_is_there_after_it_is_filled(
    descriptor: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "GIVE_BYTES", 5 * PAGE_BYTES)
    assert given_bytes(descriptor) == 0
    in_huge_pages = fill(descriptor, NUM_BYTES, num_threads).huge_bytes
    assert given_bytes(descriptor) >= NUM_BYTES
    assert 0 <= in_huge_pages <= HUGE_BYTES


class Advice:
    """A system that does what it is advised, but for what it refuses; `asked` has what it was."""

    def __init__(self, refused: dict[int, int]) -> None:
        self.refused, self.asked = refused, []
        self.real = ctypes.CDLL(None, use_errno=True)
        self.real.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def __call__(self, address: int, num_bytes: int, advice: int) -> int:
        self.asked.append(advice)
        if advice in self.refused:
            ctypes.set_errno(self.refused[advice])
            return -1
        return int(self.real.madvise(address, num_bytes, advice))


@pytest.mark.parametrize("refused", [{}, {14: errno.EINVAL}, {14: errno.EINVAL, 23: errno.EINVAL}])
def test_huge_pages_are_asked_for_first_and_a_system_that_has_none_or_is_old_gives_others(
    descriptor: int, refused: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    advice = Advice(refused)
    library = SimpleNamespace(madvise=advice, mmap=advice.real.mmap, munmap=advice.real.munmap)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: library)
    fill(descriptor, NUM_BYTES, 2)
    assert advice.asked[0] == 14
    assert set(advice.asked[1:]) == {23}
    assert given_bytes(descriptor) >= NUM_BYTES


def test_memory_that_another_mapping_was_given_is_mapped_with_its_bytes(descriptor: int) -> None:
    first = map_memory(descriptor, NUM_BYTES)
    first[:] = torch.arange(NUM_BYTES).to(torch.uint8)
    second = map_memory(descriptor, NUM_BYTES)
    assert give_by_threads(second, 2) == 0
    assert torch.equal(first, second)
    assert huge_bytes(second) % HUGE_BYTES == 0
