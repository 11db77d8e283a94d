from __future__ import annotations

import threading
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lwkv.errors import ConfigError
from lwkv.platforms import CopyBatch
from lwkv.platforms.cpu import CPU
from lwkv.platforms.protocol import Int64s
from lwkv.pool.host_pool import PAGE_ALIGNMENT, HostPool
from lwkv.pool.page_copies import PageCopies, first_batch
from lwkv.telemetry.counters import Counters

PAGE_BYTES = 5
SPAN = 3


class ScarceCPU(CPU):
    """A host that can page-lock no more than `slabs` times."""

    def __init__(self, slabs: int) -> None:
        super().__init__()
        self.slabs = slabs
        self.sizes: list[int] = []

    def alloc_pinned(self, nbytes: int) -> torch.Tensor:
        if len(self.sizes) == self.slabs:
            raise MemoryError(f"cannot page-lock {nbytes} bytes")
        self.sizes.append(nbytes)
        return super().alloc_pinned(nbytes)


def make_pool(
    num_pages: int, slabs: int = 99, page_bytes: int = PAGE_BYTES, span: int = SPAN, on_demand: bool = True
) -> HostPool:
    stride = -(-page_bytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
    return HostPool(ScarceCPU(slabs), page_bytes, num_pages * stride, span * stride, on_demand=on_demand)


def taken(pool: HostPool, count: int) -> Int64s:
    pages = pool.allocate(count)
    assert pages is not None
    return pages


def numbers(*pages: int) -> Int64s:
    return np.array(pages, np.int64)


def test_a_page_is_aligned_and_has_the_bytes_asked_for() -> None:
    pool = make_pool(7, page_bytes=4099)
    assert pool.page_stride == 8192
    for number in taken(pool, 7).tolist():
        page = pool.page(number)
        assert (page.dtype, tuple(page.shape)) == (torch.uint8, (4099,))
        assert page.data_ptr() % PAGE_ALIGNMENT == 0


def test_pages_are_different_memory() -> None:
    pool = make_pool(8)
    pages = taken(pool, 8).tolist()
    for number in pages:
        pool.page(number).fill_(number + 1)
    assert [pool.page(number).tolist() for number in pages] == [[n + 1] * PAGE_BYTES for n in pages]


def test_pages_are_neighbours_while_a_slab_has_such_a_run() -> None:
    pool = make_pool(9)
    first = taken(pool, 2)
    assert np.diff(first).tolist() == [1]
    second = taken(pool, 3)
    assert np.diff(second).tolist() == [1, 1]
    addresses = [pool.page(number).data_ptr() for number in second.tolist()]
    assert np.diff(addresses).tolist() == [4096, 4096]


def test_slabs_are_added_when_they_are_needed() -> None:
    platform = ScarceCPU(99)
    pool = HostPool(platform, PAGE_BYTES, 8 * 4096, SPAN * 4096)
    assert (pool.num_pages, platform.sizes) == (0, [])
    taken(pool, 2)
    assert pool.num_pages == 3
    taken(pool, 2)
    assert pool.num_pages == 6
    taken(pool, 4)
    assert pool.num_pages == pool.max_pages == 8
    assert platform.sizes == [3 * 4096, 3 * 4096, 2 * 4096]


def test_an_allocation_is_all_or_nothing() -> None:
    pool = make_pool(5)
    kept = taken(pool, 3)
    assert pool.allocate(3) is None
    assert (pool.pages_in_use, pool.references) == (3, 3)
    assert sorted([*taken(pool, 2).tolist(), *kept.tolist()]) == list(range(5))
    assert pool.allocate(1) is None


def test_an_allocation_that_can_never_fit_locks_no_memory() -> None:
    pool = make_pool(5)
    assert pool.allocate(6) is None
    assert pool.num_pages == 0


def test_no_page_is_an_allocation_too() -> None:
    pool = make_pool(2)
    assert taken(pool, 0).tolist() == []
    pool.release(numbers())
    pool.share(numbers())
    assert pool.num_pages == 0


def test_a_page_is_free_again_with_its_last_reference() -> None:
    pool = make_pool(2)
    pages = taken(pool, 2)
    pool.share(pages)
    assert pool.shared(pages).all()
    pool.release(pages)
    assert not pool.shared(pages).any()
    assert (pool.pages_in_use, pool.references) == (2, 2)
    assert pool.allocate(1) is None
    pool.release(pages[::-1])
    assert (pool.pages_in_use, pool.references) == (0, 0)
    assert len(taken(pool, 2)) == 2


def test_each_page_is_shared_or_not_by_itself() -> None:
    pool = make_pool(3)
    pages = taken(pool, 3)
    pool.share(pages[1:2])
    assert pool.shared(pages.reshape(1, 3)).tolist() == [[False, True, False]]


@pytest.mark.parametrize("method", ["release", "share"])
@pytest.mark.parametrize(
    ("pages", "wrong"),
    [
        ([0, 1, 2], [2]),
        ([1, 0, 1], [1]),
        ([-1, 0], [-1]),
        ([0, 4], [4]),
        ([0, 1000], [1000]),
    ],
    ids=["free", "twice", "negative", "no memory yet", "beyond the pool"],
)
def test_pages_not_in_use_are_refused_and_nothing_changes(
    method: str, pages: list[int], wrong: list[int]
) -> None:
    pool = make_pool(7)
    held = taken(pool, 2)
    assert held.tolist() == [0, 1]
    with pytest.raises(ValueError, match="not in use, or are named twice") as caught:
        getattr(pool, method)(np.array(pages, np.int64))
    assert str(wrong) in str(caught.value)
    assert (pool.pages_in_use, pool.references, pool.shortage(2)) == (2, 2, 1)
    assert taken(pool, 1).tolist() == [2]


def test_a_double_release_is_refused_and_does_no_damage() -> None:
    pool = make_pool(4)
    first, second = taken(pool, 2), taken(pool, 2)
    pool.release(first)
    with pytest.raises(ValueError, match="not in use"):
        pool.release(first)
    assert (pool.pages_in_use, pool.references) == (2, 2)
    assert sorted(taken(pool, 2).tolist()) == sorted(first.tolist())
    pool.release(second)


def test_shortage_says_how_many_pages_are_to_be_freed() -> None:
    pool = make_pool(3)
    held = taken(pool, 3)
    assert pool.shortage(2) == 2
    pool.release(held[:1])
    assert (pool.shortage(2), pool.shortage(1), pool.shortage(0)) == (1, 0, 0)


def test_a_pool_costs_nothing_for_pages_that_do_not_exist_yet() -> None:
    pool = HostPool(ScarceCPU(1), PAGE_BYTES, 1 << 60, SPAN * 4096)
    pages = taken(pool, 2)
    assert (pool.num_pages, pool.max_pages) == (SPAN, 1 << 48)
    for wrong in (numbers(SPAN), numbers(1 << 47), numbers(-1)):
        with pytest.raises(ValueError, match="not in use"):
            pool.release(wrong)
    pool.release(pages)
    assert (pool.pages_in_use, pool.references) == (0, 0)


def test_a_pool_too_small_for_one_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_local_cpu_size holds 4095 bytes.*4096"):
        HostPool(CPU(), PAGE_BYTES, 4095)


def test_a_slab_holds_a_page_at_least() -> None:
    pool = HostPool(CPU(), PAGE_BYTES, 2 * 4096, slab_bytes=1)
    assert sorted(taken(pool, 2).tolist()) == [0, 1]
    pool.release(numbers(0, 1))
    assert pool.pages_in_use == 0


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def scarce_pool(slabs: int) -> tuple[HostPool, ScarceCPU, Clock, Counters]:
    """A pool for nine pages, three a slab, of which so many slabs can be had."""
    platform, clock, counters = ScarceCPU(slabs), Clock(), Counters()
    return HostPool(platform, PAGE_BYTES, 9 * 4096, SPAN * 4096, counters, clock), platform, clock, counters


@pytest.mark.parametrize("slabs", [0, 1, 2])
def test_memory_that_cannot_be_locked_leaves_a_smaller_pool_a_line_and_a_count(
    slabs: int, caplog: pytest.LogCaptureFixture
) -> None:
    pool, _, _, counters = scarce_pool(slabs)
    assert pool.allocate(9) is None
    assert caplog.messages == [
        f"host memory stays at {3 * slabs} of 9 pages for now: cannot page-lock 12288 bytes; free host "
        "memory, raise the limit of locked memory (ulimit -l) or lower max_local_cpu_size"
    ]
    assert counters.totals() == {"page_lock_failures": 1}
    assert (pool.pages_in_use, pool.available) == (0, 3 * slabs)
    assert len(taken(pool, 3 * slabs)) == 3 * slabs
    assert pool.allocate(1) is None
    assert counters.totals() == {"page_lock_failures": 1}, "the driver is left alone for a while"


@pytest.mark.parametrize("slabs", [0, 1])
def test_memory_that_can_be_locked_later_is_used_then(slabs: int, caplog: pytest.LogCaptureFixture) -> None:
    pool, platform, clock, counters = scarce_pool(slabs)
    assert pool.allocate(9) is None
    clock.now += 1
    platform.slabs = 99
    assert pool.available == 9
    assert len(taken(pool, 9)) == 9
    assert counters.totals() == {"page_lock_failures": 1}
    assert len(caplog.records) == 1


def test_the_longer_memory_cannot_be_locked_the_more_seldom_it_is_tried() -> None:
    pool, _, clock, counters = scarce_pool(0)
    tried = []
    for _ in range(300):
        before = counters.totals().get("page_lock_failures", 0)
        assert pool.allocate(1) is None
        if counters.totals()["page_lock_failures"] > before:
            tried.append(clock.now - 50)
        clock.now += 1
    assert tried == [0, 1, 3, 7, 15, 31, 63, 127, 191, 255]


def test_growing_ahead_ends_where_memory_cannot_be_locked() -> None:
    pool, _, _, counters = scarce_pool(1)
    pool.grow_ahead(9)
    assert (pool.num_pages, pool.available) == (3, 3)
    assert counters.totals() == {"page_lock_failures": 1}


def test_what_is_available_is_what_is_free_or_may_be_added() -> None:
    pool = make_pool(9)
    assert pool.available == 9
    taken(pool, 4)
    assert (pool.num_pages, pool.available) == (6, 5)
    pool.close()
    assert pool.available == 0


def test_after_everything_was_taken_and_given_back_the_largest_allocation_fits_again() -> None:
    pool = make_pool(9)
    held = [taken(pool, 1) for _ in range(9)]
    assert pool.allocate(1) is None
    for pages in held[1::2] + held[::2]:
        pool.release(pages)
    assert sorted(taken(pool, 9).tolist()) == list(range(9))


def test_reserve_locks_whole_slabs_now_and_never_more_than_the_maximum() -> None:
    pool = make_pool(7)
    pool.reserve(0)
    assert pool.num_pages == 0
    pool.reserve(4097)
    assert pool.num_pages == 3
    pool.reserve(1 << 40)
    assert (pool.num_pages, pool.pages_in_use) == (7, 0)


def test_a_pool_that_is_locked_ahead_gives_what_is_there_and_locks_nothing_for_who_asks() -> None:
    pool = make_pool(7, on_demand=False)
    assert (pool.allocate(1), pool.available) == (None, 0)
    assert pool.lock_slab()
    assert (pool.allocate(4), pool.available) == (None, 3)
    assert taken(pool, 3).tolist() == [0, 1, 2]
    assert [pool.lock_slab() for _ in range(3)] == [True, True, False]
    assert (pool.available, pool.num_pages) == (4, 7)


def test_locking_ahead_ends_where_memory_cannot_be_locked() -> None:
    pool = make_pool(9, slabs=2, on_demand=False)
    assert [pool.lock_slab() for _ in range(4)] == [True, True, False, False]
    assert (pool.available, pool.num_pages) == (6, 6)


def test_reserve_says_when_memory_cannot_be_locked() -> None:
    pool = make_pool(9, slabs=1)
    with pytest.raises(MemoryError, match="cannot page-lock"):
        pool.reserve(4 * 4096)
    assert pool.num_pages == 3
    assert len(taken(pool, 3)) == 3


def test_a_closed_pool_hands_out_nothing_and_gives_its_memory_back() -> None:
    pool = make_pool(4)
    pool.release(taken(pool, 4))
    pool.close()
    pool.close()
    assert pool.allocate(1) is None
    assert pool.allocate(0) is None
    assert pool.slabs.memory == []
    assert pool.shortage(1) > pool.num_pages, "no eviction helps"


def test_a_pool_closed_in_use_keeps_its_memory_until_the_last_release() -> None:
    pool = make_pool(4)
    pages = taken(pool, 3)
    pool.page(int(pages[1])).fill_(9)
    pool.close()
    pool.release(pages[[0, 2]])
    assert pool.page(int(pages[1])).tolist() == [9] * PAGE_BYTES
    assert pool.allocate(1) is None
    pool.release(pages[1:2])
    assert (pool.slabs.memory, pool.references) == ([], 0)


def test_a_slab_that_comes_when_the_pool_is_closed_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(7, on_demand=False)
    lock = pool._platform.alloc_pinned

    def close_meanwhile(nbytes: int) -> torch.Tensor:
        pool.close()
        return lock(nbytes)

    monkeypatch.setattr(pool._platform, "alloc_pinned", close_meanwhile)
    pool.lock_slab()
    assert pool.slabs.memory == []


def runs_of(batch: CopyBatch) -> list[tuple[int, int, int]]:
    """(offset in the device buffer, host page, bytes) of each run."""
    pages = batch.slab_of * SPAN + batch.host_offsets // 4096
    return list(zip(batch.device_offsets.tolist(), pages.tolist(), batch.sizes.tolist(), strict=True))


@pytest.mark.parametrize(
    ("pages", "sizes", "runs"),
    [
        ([0, 1, 2], [4096] * 3, [(0, 0, 12288)]),
        ([1, 2, 3, 4], [4096] * 4, [(0, 1, 8192), (8192, 3, 8192)]),
        ([2, 1, 0], [4096] * 3, [(0, 2, 4096), (4096, 1, 4096), (8192, 0, 4096)]),
        ([0, 1, 2], [4096, 9, 4096], [(0, 0, 4105), (8192, 2, 4096)]),
        ([4], [7], [(0, 4, 7)]),
    ],
    ids=["neighbours", "two slabs", "backwards", "a partial page ends its run", "one"],
)
def test_neighbouring_full_pages_are_copied_as_one(
    pages: list[int], sizes: list[int], runs: list[tuple[int, int, int]]
) -> None:
    pool = make_pool(6, page_bytes=4096)
    taken(pool, 6)
    batch = PageCopies(pool.slabs, np.array([pages], np.int64), np.array(sizes, np.int64), 4096).batch(0, 1)
    assert runs_of(batch) == runs


def test_pages_with_padding_are_never_copied_as_one() -> None:
    pool = make_pool(3, page_bytes=4095)
    taken(pool, 3)
    batch = PageCopies(pool.slabs, np.array([[0, 1, 2]]), np.full(3, 4095), 4095).batch(0, 1)
    assert runs_of(batch) == [(0, 0, 4095), (4095, 1, 4095), (8190, 2, 4095)]


def test_layers_whose_pages_neighbour_differently_have_runs_of_their_own() -> None:
    pool = make_pool(9, page_bytes=4096)
    taken(pool, 9)
    pages = np.array([[0, 1], [2, 3], [7, 8]], np.int64)
    copies = PageCopies(pool.slabs, pages, np.full(2, 4096), 4096)
    assert [runs_of(copies.batch(layer, layer + 1)) for layer in range(3)] == [
        [(0, 0, 8192)],
        [(0, 2, 4096), (4096, 3, 4096)],
        [(0, 7, 8192)],
    ]


def test_layers_that_follow_each_other_are_copied_as_one_where_they_share_a_buffer() -> None:
    pool = make_pool(24, page_bytes=4096)
    taken(pool, 24)
    # Slabs of three pages: 6 begins one.
    pages = np.array([[3], [4], [5], [6], [7], [16]], np.int64)
    copies = PageCopies(pool.slabs, pages, np.full(1, 4096), 4096)
    assert runs_of(copies.batch(0, 3)) == [(0, 3, 3 * 4096)]
    assert runs_of(copies.batch(1, 3)) == [(0, 4, 2 * 4096)]
    assert runs_of(copies.batch(2, 4)) == [(0, 5, 4096), (4096, 6, 4096)], "a slab ends between them"
    assert runs_of(copies.batch(4, 6)) == [(0, 7, 4096), (4096, 16, 4096)]
    partial = PageCopies(pool.slabs, pages, np.full(1, 7), 4096)
    assert runs_of(partial.batch(0, 2)) == [(0, 3, 7), (4096, 4, 7)]
    apart = PageCopies(pool.slabs, np.array([[3, 5], [6, 7]], np.int64), np.full(2, 4096), 4096)
    assert len(runs_of(apart.batch(0, 2))) == 3


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=9, unique=True),
    st.sampled_from([4090, 4096]),
)
def test_the_first_layer_s_copies_are_those_of_any_layer(pages: list[int], page_bytes: int) -> None:
    pool = make_pool(9, page_bytes=page_bytes)
    taken(pool, 9)
    numbers = np.array(pages, np.int64)
    first = first_batch(pool.slabs, numbers, page_bytes)
    expected = PageCopies(pool.slabs, numbers[None], np.full(len(pages), page_bytes), page_bytes).batch(0, 1)
    assert runs_of(first) == runs_of(expected)
    for name in ("slab_of", "host_offsets", "host_addresses", "device_offsets", "sizes"):
        array, other = getattr(first, name), getattr(expected, name)
        assert array.dtype == other.dtype == np.int64
        assert array.tolist() == other.tolist(), name
    assert first.stable == expected.stable


def test_a_batch_outlives_the_growth_of_its_pool() -> None:
    pool = make_pool(6, page_bytes=4096)
    pages = taken(pool, 3)
    pool.page(1).fill_(8)
    batch = PageCopies(pool.slabs, pages[None], np.full(3, 4096), 4096).batch(0, 1)
    taken(pool, 3)
    assert len(batch.slabs) == 1
    assert batch.host_addresses.tolist() == [pool.page(0).data_ptr()]


@st.composite
def copies(draw: Any) -> tuple[int, Int64s, Int64s]:
    page_bytes = draw(st.sampled_from([4090, 4096]))
    layers, chunks = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    order = draw(st.one_of(st.just(list(range(16))), st.permutations(range(16))))
    sizes = draw(st.lists(st.sampled_from([1, 77, page_bytes]), min_size=chunks, max_size=chunks))
    pages = np.array(order[: layers * chunks], np.int64).reshape(layers, chunks)
    return page_bytes, pages, np.array(sizes, np.int64)


@settings(max_examples=60, deadline=None)
@given(copies())
def test_batches_move_exactly_the_bytes_asked_for(case: tuple[int, Int64s, Int64s]) -> None:
    page_bytes, pages, sizes = case
    pool = make_pool(16, page_bytes=page_bytes)
    for number in taken(pool, 16).tolist():
        pool.page(number).fill_(number + 1)
    copies, platform = PageCopies(pool.slabs, pages, sizes, page_bytes), CPU()
    for first, last in combinations(range(len(pages) + 1), 2):
        rows = pages[first:last]
        buffer = torch.zeros(page_bytes * rows.size, dtype=torch.uint8)
        wanted = buffer.clone()
        moved = zip(rows.ravel().tolist(), np.tile(sizes, len(rows)).tolist(), strict=True)
        for i, (page, size) in enumerate(moved):
            wanted[i * page_bytes : i * page_bytes + size] = page + 1
        batch = copies.batch(first, last)
        platform.load_batch(buffer, batch, platform.current_stream(torch.device("cpu")))
        assert torch.equal(buffer, wanted)


class PoolMachine(RuleBasedStateMachine):
    """A pool beside a plain count of each page's references."""

    NUM_PAGES = 8

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(self.NUM_PAGES)
        self.counts: dict[int, int] = {}

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        pages = self.pool.allocate(count)
        assert (pages is None) == (count > self.NUM_PAGES - len(self.counts))
        found = [] if pages is None else pages.tolist()
        assert not set(found) & set(self.counts)
        assert len(set(found)) == len(found)
        for page in found:
            self.counts[page] = 1
            self.pool.page(page).fill_(page + 1)

    @precondition(lambda self: self.counts)
    @rule(data=st.data())
    def share(self, data: Any) -> None:
        pages = self._some(data)
        self.pool.share(numbers(*pages))
        for page in pages:
            self.counts[page] += 1

    @precondition(lambda self: self.counts)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        pages = self._some(data)
        self.pool.release(numbers(*pages))
        for page in pages:
            self.counts[page] -= 1
        self.counts = {page: count for page, count in self.counts.items() if count}

    @rule(data=st.data(), page=st.integers(-2, 12))
    def release_what_is_not_in_use(self, data: Any, page: int) -> None:
        pages = [*self._some(data), page]
        if len(set(pages)) == len(pages) and page in self.counts:
            return
        with pytest.raises(ValueError, match="not in use"):
            self.pool.release(numbers(*pages))

    @invariant()
    def counts_agree_and_no_page_was_handed_out_twice(self) -> None:
        assert self.pool.pages_in_use == len(self.counts)
        assert self.pool.references == sum(self.counts.values())
        assert self.pool._counts.num_free == self.pool.num_pages - len(self.counts)
        assert all(self.pool.page(page).tolist() == [page + 1] * PAGE_BYTES for page in self.counts)

    def teardown(self) -> None:
        for page, count in self.counts.items():
            for _ in range(count):
                self.pool.release(numbers(page))
        assert (self.pool.pages_in_use, self.pool.references) == (0, 0)
        assert len(taken(self.pool, self.NUM_PAGES)) == self.NUM_PAGES

    def _some(self, data: Any) -> list[int]:
        held = sorted(self.counts)
        return data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)


def test_pages_of_eight_threads_never_overlap() -> None:
    pool = make_pool(40, span=7)
    owners = np.zeros(40, np.int64)
    faults: list[str] = []

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        held: list[Int64s] = []
        for _ in range(400):
            pages = pool.allocate(int(random.integers(1, 9)))
            if pages is not None:
                if owners[pages].any():
                    faults.append(f"{pages.tolist()} belonged to {owners[pages].tolist()}")
                owners[pages] = number
                held.append(pages)
            if held and random.random() < 0.6:
                pages = held.pop(int(random.integers(len(held))))
                if (owners[pages] != number).any():
                    faults.append(f"{pages.tolist()} came to belong to {owners[pages].tolist()}")
                owners[pages] = 0
                pool.release(pages)
        for pages in held:
            owners[pages] = 0
            pool.release(pages)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert (pool.pages_in_use, pool.references) == (0, 0)
    assert len(taken(pool, 40)) == 40
