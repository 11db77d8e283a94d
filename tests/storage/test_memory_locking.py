"""Host memory that is page-locked in the background."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from storage.rig import NUM_LAYERS, PAGE_BYTES, Clock, keys

from lwkv.platforms.cpu import CPU
from lwkv.pool.host_pool import MOST_REST_S, HostPool
from lwkv.storage import StorageManager

LONG_S = 20.0
SLAB_PAGES = 2 * NUM_LAYERS


class SlowToLock(CPU):
    """A host where a slab is page-locked when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)

    def alloc_pinned(self, nbytes: int) -> torch.Tensor:
        self.begun.release()
        assert self.let.acquire(timeout=LONG_S)
        return super().alloc_pinned(nbytes)


@pytest.fixture
def host() -> Iterator[SlowToLock]:
    host = SlowToLock()
    yield host
    host.let.release(99)


def make_manager(host: SlowToLock, num_chunks: int) -> StorageManager:
    pool = HostPool(host, PAGE_BYTES, num_chunks * NUM_LAYERS * 4096, SLAB_PAGES * 4096, on_demand=False)
    return StorageManager(pool, NUM_LAYERS)


def test_a_store_waits_for_no_memory_and_takes_what_is_locked(host: SlowToLock) -> None:
    manager = make_manager(host, num_chunks=6)
    manager.lock_memory()
    assert host.begun.acquire(timeout=LONG_S)
    assert manager.begin_write(keys(1, 2, 3)) is None
    host.let.release()
    assert host.begun.acquire(timeout=LONG_S)  # the first slab is there when the second is begun
    write = manager.begin_write(keys(1, 2, 3))
    assert write is not None
    assert len(write.positions) == 2
    write.give_up()
    host.let.release(99)
    assert manager.wait_locked(LONG_S)
    write = manager.begin_write(keys(1, 2, 3))
    assert write is not None
    assert len(write.positions) == 3
    write.give_up()
    assert manager.close(LONG_S)


def test_closing_waits_for_the_slab_at_hand_and_begins_no_other(host: SlowToLock) -> None:
    manager = make_manager(host, num_chunks=20)
    manager.lock_memory()
    assert host.begun.acquire(timeout=LONG_S)
    assert not manager.close(0.0)
    host.let.release(99)
    assert manager.close(LONG_S)
    assert not host.begun.acquire(blocking=False)


def test_who_waits_for_all_of_it_waits_no_longer_than_said(host: SlowToLock) -> None:
    manager = make_manager(host, num_chunks=4)
    manager.lock_memory()
    assert not manager.wait_locked(0.01)
    host.let.release(99)
    assert manager.wait_locked(LONG_S)
    assert manager.close(LONG_S)


class ShortOfMemory(CPU):
    """A host where nothing can be page-locked until other programs give memory back."""

    has_memory = False

    def alloc_pinned(self, nbytes: int) -> torch.Tensor:
        if not self.has_memory:
            raise MemoryError("cannot page-lock")
        return super().alloc_pinned(nbytes)


def test_memory_that_could_not_be_locked_at_the_start_is_tried_again_by_what_is_refused() -> None:
    host, clock = ShortOfMemory(), Clock()
    pool = HostPool(host, PAGE_BYTES, 6 * NUM_LAYERS * 4096, SLAB_PAGES * 4096, clock=clock, on_demand=False)
    manager = StorageManager(pool, NUM_LAYERS)
    manager.lock_memory()
    assert manager.wait_locked(LONG_S)
    assert manager.begin_write(keys(1)) is None
    assert manager.wait_locked(LONG_S)
    host.has_memory = True
    clock.now += 2 * MOST_REST_S
    assert manager.begin_write(keys(1)) is None, "it does not wait for the memory"
    assert manager.wait_locked(LONG_S)
    write = manager.begin_write(keys(1))
    assert write is not None
    write.abort()
    assert manager.close(LONG_S)
