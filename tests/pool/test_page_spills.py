"""Pages beside pages: found by position, freed with the last reference of the page they belong to."""

from __future__ import annotations

import numpy as np

from lwkv.platforms.cpu import CPU
from lwkv.pool.host_pool import HostPool
from lwkv.pool.spill_copies import spill_batch

PAGE = 4096


def make_pool() -> HostPool:
    return HostPool(CPU(), PAGE, 10 * PAGE, slab_bytes=3 * PAGE)


def test_spill_pages_are_found_by_position_and_freed_with_their_page() -> None:
    pool = make_pool()
    pages, spill = pool.allocate(3), pool.allocate(4)
    assert pages is not None
    assert spill is not None
    assert pool.spill_of(pages) == {}
    pool.add_spill(pages[1:], spill.reshape(2, 2))
    found = pool.spill_of(pages[::-1])
    assert {position: mine.tolist() for position, mine in found.items()} == {
        0: spill[2:].tolist(),
        1: spill[:2].tolist(),
    }
    pool.share(pages[1:2])
    pool.release(pages)
    assert pool.pages_in_use == 3  # one page and its two
    pool.release(pages[1:2])
    assert pool.pages_in_use == 0
    assert pool.references == 0


def test_spill_pages_can_be_dropped_before_their_page() -> None:
    pool = make_pool()
    pages, spill = pool.allocate(2), pool.allocate(2)
    assert pages is not None
    assert spill is not None
    pool.add_spill(pages, spill.reshape(2, 1))
    pool.drop_spill(pages[:1])
    assert pool.pages_in_use == 3
    pool.release(pages)
    assert pool.pages_in_use == 0


def test_copies_fill_spill_pages_one_after_the_other() -> None:
    pool = make_pool()
    spill = pool.allocate(4)
    assert spill is not None
    batch = spill_batch(pool, np.array([0, 20000]), spill.reshape(2, 2), PAGE + 100)
    assert batch.device_offsets.tolist() == [0, PAGE, 20000, 20000 + PAGE]
    assert batch.sizes.tolist() == [PAGE, 100, PAGE, 100]
    for run, page in enumerate(spill.tolist()):
        memory = batch.slabs[int(batch.slab_of[run])]
        assert batch.host_addresses[run] == memory.data_ptr() + batch.host_offsets[run]
        assert batch.host_addresses[run] == pool.page(page).data_ptr()
