"""Memory of a node is page-locked in slabs, in the background; nothing is found in what is not locked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from shared_host.owners import LONG_S, owner_at
from shared_host.workers import LAYERS, LENGTH, PAGE_BYTES, check, prompt, put, wait_for
from storage.rig import keys

from lwkv.platforms.cpu import CPU
from lwkv.shared_host.client.opening import open_node_memory
from lwkv.shared_host.client.pool import NodePool
from lwkv.shared_host.client.tier import NodeTier
from lwkv.telemetry.counters import Counters

PAGES, SPAN = 32, 6


class LockingCPU(CPU):
    """Notes what is page-locked, and by which thread; fails after so many times."""

    def __init__(self, most: int = 99) -> None:
        super().__init__()
        self.most = most
        self.sizes: list[int] = []
        self.locked: dict[int, int] = {}
        self.devices: dict[int, str] = {}

    def use_device(self) -> None:
        self.devices[threading.get_ident()] = "chosen"

    def host_register(self, memory: torch.Tensor) -> bool:
        if len(self.sizes) == self.most:
            return False
        self.sizes.append(memory.nbytes)
        self.locked[memory.data_ptr()] = threading.get_ident()
        return True

    def host_unregister(self, memory: torch.Tensor) -> None:
        if memory.nbytes:
            del self.locked[memory.data_ptr()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "host.sock"


@pytest.fixture
def opened(path: Path) -> Callable[..., tuple[NodePool, NodeTier]]:
    def open_it(platform: LockingCPU, locks_ahead: bool = True) -> tuple[NodePool, NodeTier]:
        return open_node_memory(
            str(path), platform, PAGE_BYTES, LONG_S, Counters(), locks_ahead, platform.use_device
        )

    return open_it


def test_memory_is_locked_slab_by_slab_and_what_is_not_yet_is_neither_given_nor_found(
    path: Path, opened: Callable[..., tuple[NodePool, NodeTier]]
) -> None:
    with owner_at(path, PAGES):
        other, others = opened(LockingCPU(), locks_ahead=False)
        for number in (1, 2):
            assert put(other, others, prompt(number), prompt(number))
        assert others.contains(keys(*prompt(2))) == [True] * LENGTH
        platform = LockingCPU()
        pool, tier = opened(platform)
        assert (pool.num_pages, pool.allocate(1), platform.sizes) == (0, None, [])
        assert tier.contains(keys(*prompt(1))) == tier.contains(keys(*prompt(2))) == [False] * LENGTH
        for _ in range(2):
            assert pool.lock_slab()
        # Twelve pages: those of the first prompt.
        assert tier.contains(keys(*prompt(1), *prompt(2))) == [True] * LENGTH + [False] * LENGTH
        assert check(pool, tier, prompt(2)) == prompt(2)
        assert tier.pin_prefix(keys(*prompt(2))) == []
        assert pool.allocate(1) is None, "what is free lies behind what is locked"
        while pool.lock_slab():
            pass
        assert platform.sizes == 5 * [SPAN * 4096] + [2 * 4096]
        assert check(pool, tier, prompt(2)) == []
        pages = pool.allocate(PAGES - 2 * LENGTH * LAYERS)
        assert pages is not None
        pool.release(pages)
        pool.close()
        assert platform.locked == {}, "all is unlocked"
        other.close()


def test_where_no_more_can_be_locked_the_engine_works_with_what_it_has(
    path: Path, opened: Callable[..., tuple[NodePool, NodeTier]]
) -> None:
    with owner_at(path, PAGES):
        pool, tier = opened(LockingCPU(most=2))
        while pool.lock_slab():
            pass
        assert pool.num_pages == 2 * SPAN
        assert put(pool, tier, prompt(1), prompt(1))
        assert check(pool, tier, prompt(1)) == []
        assert pool.allocate(1) is None
        pool.close()


def test_the_memory_of_a_new_owner_is_locked_by_a_thread_of_the_engine_s_device(
    path: Path, opened: Callable[..., tuple[NodePool, NodeTier]]
) -> None:
    platform = LockingCPU()
    with owner_at(path, PAGES):
        pool, tier = opened(platform)
        while pool.lock_slab():
            pass
        before = pool.session
    with owner_at(path, PAGES):
        wait_for(lambda: pool.session not in (None, before) and pool.num_pages == PAGES)
        assert len(platform.locked) == 6, "the old memory is unlocked"
        assert set(platform.locked.values()) <= set(platform.devices)
        assert put(pool, tier, prompt(1), prompt(1))
        assert check(pool, tier, prompt(1)) == []
        pool.close()


def test_nothing_of_a_new_owner_is_locked_before_the_engine_began_to(
    path: Path, opened: Callable[..., tuple[NodePool, NodeTier]]
) -> None:
    platform = LockingCPU()
    with owner_at(path, PAGES):
        pool, _ = opened(platform)
        first = pool.session
    with owner_at(path, PAGES):
        wait_for(lambda: pool.session is not None and pool.session is not first)
        assert platform.sizes == []
        pool.close()


class SlowToUnlock(LockingCPU):
    """Unlocks nothing before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_unlock = threading.Event()

    def host_unregister(self, memory: torch.Tensor) -> None:
        assert self.may_unlock.wait(LONG_S)
        super().host_unregister(memory)


def test_nobody_waits_while_the_memory_of_an_owner_that_is_gone_is_unlocked(
    path: Path, opened: Callable[..., tuple[NodePool, NodeTier]]
) -> None:
    platform = SlowToUnlock()
    with owner_at(path, PAGES):
        pool, _ = opened(platform)
        while pool.lock_slab():
            pass
        pages = pool.allocate(3)
        assert pages is not None
    wait_for(lambda: pool.session is None)
    pool.release(pages)
    assert pool.references == 0
    assert pool.allocate(1) is None
    assert len(platform.locked) == 6, "it is being unlocked meanwhile"
    platform.may_unlock.set()
    wait_for(lambda: platform.locked == {})
    pool.close()


class UnlocksNothing(LockingCPU):
    def host_unregister(self, memory: torch.Tensor) -> None:
        raise RuntimeError("the device fails")


def test_memory_that_cannot_be_unlocked_is_logged_and_stays_mapped(
    path: Path, opened: Callable[..., tuple[NodePool, NodeTier]], caplog: pytest.LogCaptureFixture
) -> None:
    with owner_at(path, PAGES):
        pool, _ = opened(UnlocksNothing())
        while pool.lock_slab():
            pass
        pages = pool.allocate(3)
        assert pages is not None
        pool.close()
        pool.release(pages)
    assert caplog.text.count("stay page-locked: the device fails") == 6
    assert sum(slab.nbytes for slab in pool._stuck) == PAGES * 4096


def test_a_page_s_storage_is_its_slab_and_no_more_for_tiers_that_register_it(
    path: Path, opened: Callable[..., tuple[NodePool, NodeTier]]
) -> None:
    with owner_at(path, PAGES):
        pool, _ = opened(LockingCPU())
        while pool.lock_slab():
            pass
        pages = pool.allocate(PAGES)
        assert pages is not None
        stored = [pool.page(number).untyped_storage() for number in pages.tolist()]
        assert {storage.nbytes() for storage in stored} == {SPAN * 4096, PAGES % SPAN * 4096}
        assert {storage.data_ptr() for storage in stored} == set(pool.slabs.bases.tolist())
        pool.release(pages)
        pool.close()
