from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from storage.rig import PAGE_BYTES, key, keys

from lwkv.keys import ChunkKey
from lwkv.platforms.cpu import CPU
from lwkv.pool.host_pool import HostPool
from lwkv.storage import Chunk, HostTier

NUM_LAYERS = 2


@pytest.fixture
def pool() -> HostPool:
    return HostPool(CPU(), PAGE_BYTES, 20 * 4096, 6 * 4096)


@pytest.fixture
def host(pool: HostPool) -> HostTier:
    return HostTier(pool)


def make_chunk(pool: HostPool) -> Chunk:
    pages = pool.allocate(NUM_LAYERS)
    assert pages is not None
    return Chunk(pages)


def insert(host: HostTier, pool: HostPool, *numbers: int) -> list[Chunk]:
    chunks = [make_chunk(pool) for _ in numbers]
    host.insert(keys(*numbers), chunks)
    return chunks


def here(host: HostTier, *numbers: int) -> list[int]:
    return [n for n, there in zip(numbers, host.contains(keys(*numbers)), strict=True) if there]


def test_a_chunk_is_there_with_all_its_pages_after_insert_and_gone_with_all_after_evict(
    host: HostTier, pool: HostPool
) -> None:
    insert(host, pool, 1, 2)
    assert host.contains(keys(0, 1, 2)) == [False, True, True]
    assert (len(host), pool.references) == (2, 4)
    assert host.evict(1)
    assert (len(host), pool.references, host.evicted) == (1, 2, 1)


def test_chunks_deep_in_a_prefix_go_first(host: HostTier, pool: HostPool) -> None:
    insert(host, pool, 1, 2, 3)
    assert host.evict(1)
    assert here(host, 1, 2, 3) == [1, 2]
    assert host.evict(1)
    assert here(host, 1, 2, 3) == [1]


def test_the_least_recently_pinned_go_first(host: HostTier, pool: HostPool) -> None:
    insert(host, pool, 1)
    insert(host, pool, 2, 3)
    host.unpin([chunk for chunk in host.pin(keys(1)) if chunk])
    order = []
    while len(host):
        before = here(host, 1, 2, 3)
        assert host.evict(1)
        order += sorted(set(before) - set(here(host, 1, 2, 3)))
    assert order == [3, 2, 1]


def test_eviction_frees_what_is_asked_or_nothing(host: HostTier, pool: HostPool) -> None:
    insert(host, pool, 1, 2, 3)
    [pinned] = host.pin(keys(3))
    assert not host.evict(5)
    assert here(host, 1, 2, 3) == [1, 2, 3]
    assert host.evict(3)
    assert here(host, 1, 2, 3) == [3]
    assert not host.evict(1)
    assert pinned is not None
    host.unpin([pinned])
    assert host.evict(2)
    assert (len(host), pool.references, host.evicted) == (0, 0, 3)


def test_what_can_be_evicted_is_what_is_neither_pinned_nor_read_elsewhere(
    host: HostTier, pool: HostPool
) -> None:
    [_, second, _] = insert(host, pool, 1, 2, 3)
    pinned = host.pin(keys(3))
    pool.share(second.pages)
    assert host.evictable() == NUM_LAYERS
    assert not host.evict(NUM_LAYERS + 1)
    pool.release(second.pages)
    host.unpin([chunk for chunk in pinned if chunk])
    assert host.evictable() == 3 * NUM_LAYERS


def test_a_chunk_that_is_pinned_at_the_close_goes_with_its_last_pin(host: HostTier, pool: HostPool) -> None:
    insert(host, pool, 1, 2)
    [first], [again] = host.pin(keys(1)), host.pin(keys(1))
    assert first is not None
    assert again is not None
    host.close()
    pool.close()
    assert (len(host), pool.references) == (1, NUM_LAYERS)
    host.unpin([first])
    assert pool.references == NUM_LAYERS
    host.unpin([again])
    assert (len(host), pool.references, pool.slabs.memory) == (0, 0, [])


class Diary:
    """A watcher that writes down what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, list[ChunkKey]]] = []

    def kept(self, keys: Sequence[ChunkKey]) -> None:
        self.lines.append(("kept", list(keys)))

    def dropped(self, keys: Sequence[ChunkKey]) -> None:
        self.lines.append(("dropped", list(keys)))


def test_a_watcher_is_told_what_comes_and_what_is_evicted_in_order(host: HostTier, pool: HostPool) -> None:
    host.watcher = diary = Diary()
    insert(host, pool, 1, 2)
    assert host.evict(1)
    insert(host, pool, 2)
    assert diary.lines == [("kept", keys(1, 2)), ("dropped", keys(2)), ("kept", keys(2))]


def test_nothing_is_evicted_for_no_page(host: HostTier, pool: HostPool) -> None:
    insert(host, pool, 1)
    assert host.evict(0)
    assert len(host) == 1


def test_a_chunk_that_is_being_read_elsewhere_stays_since_its_pages_would_not_become_free(
    host: HostTier, pool: HostPool
) -> None:
    [first, _] = insert(host, pool, 1, 2)
    pool.share(first.pages[1:])
    assert not host.evict(3)
    assert host.evict(2)
    assert here(host, 1, 2) == [1]
    pool.release(first.pages[1:])
    assert host.evict(2)
    assert pool.references == 0


def test_a_chunk_pinned_twice_is_kept_until_it_is_unpinned_twice(host: HostTier, pool: HostPool) -> None:
    insert(host, pool, 1)
    [first], [second] = host.pin(keys(1)), host.pin(keys(1))
    assert first is second is not None
    assert host.pins == 2
    host.unpin([first])
    assert not host.evict(1)
    host.unpin([second])
    assert host.pins == 0
    assert host.evict(1)


def test_pin_finds_what_is_there_in_the_order_asked(host: HostTier, pool: HostPool) -> None:
    [first, third] = insert(host, pool, 1, 3)
    assert host.pin(keys(3, 2, 1)) == [third, None, first]
    host.unpin([first, third])


def test_a_chunk_inserted_again_gives_its_pages_back_and_the_first_stays(
    host: HostTier, pool: HostPool
) -> None:
    [first] = insert(host, pool, 1)
    insert(host, pool, 1, 2)
    assert host.pin(keys(1)) == [first]
    assert (len(host), pool.references) == (2, 4)


def test_a_key_twice_in_one_insert_is_kept_once(host: HostTier, pool: HostPool) -> None:
    insert(host, pool, 1, 2, 1)
    assert (len(host), pool.references) == (2, 4)


def test_close_drops_all_but_the_pinned_and_keeps_nothing_new(host: HostTier, pool: HostPool) -> None:
    insert(host, pool, 1, 2)
    [pinned] = host.pin(keys(2))
    host.close()
    assert here(host, 1, 2) == [2]
    insert(host, pool, 3)
    assert here(host, 1, 2, 3) == [2]
    assert pool.references == NUM_LAYERS
    assert pinned is not None
    host.unpin([pinned])
    host.close()
    assert (len(host), pool.references) == (0, 0)


PARENTS = {0: None, 1: 0, 2: 1, 3: 2, 4: 1, 5: 4, 6: None, 7: 6}
"""Three prompts, two of which begin alike, as a tree."""


def prompt_up_to(number: int) -> list[int]:
    parent = PARENTS[number]
    return [*([] if parent is None else prompt_up_to(parent)), number]


@st.composite
def parts_of_prompts(draw: st.DrawFn) -> list[int]:
    """Chunks of a prompt in a row."""
    prompt = prompt_up_to(draw(st.sampled_from(list(PARENTS))))
    return prompt[draw(st.integers(0, len(prompt) - 1)) :]


class HostTierMachine(RuleBasedStateMachine):
    """A host tier beside a list of [number, pins, shared], those used longest ago first."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(CPU(), PAGE_BYTES, 14 * 4096, 3 * 4096)
        self.host = HostTier(self.pool)
        self.model: list[list[int]] = []
        self.pinned: list[tuple[int, Chunk]] = []
        self.shared: list[tuple[int, Chunk]] = []

    def entry(self, number: int) -> list[int] | None:
        return next((entry for entry in self.model if entry[0] == number), None)

    def use(self, numbers: list[int]) -> None:
        """Whoever uses chunks uses those before them, last to first; up to one that is missing."""
        before = prompt_up_to(numbers[0])[:-1] if self.entry(numbers[0]) else []
        while not all(map(self.entry, before)):
            del before[0]
        for number in reversed([*before, *numbers]):
            if (entry := self.entry(number)) is not None:
                self.model.remove(entry)
                self.model.append(entry)

    def is_orphan(self, number: int) -> bool:
        return not all(map(self.entry, prompt_up_to(number)))

    @rule(numbers=parts_of_prompts())
    def insert(self, numbers: list[int]) -> None:
        pages = self.pool.allocate(NUM_LAYERS * len(numbers))
        if pages is None:
            return
        parents = [None if (parent := PARENTS[n]) is None else key(parent) for n in numbers]
        self.host.insert(keys(*numbers), [Chunk(row) for row in pages.reshape(-1, NUM_LAYERS)], parents)
        self.model += [[number, 0, 0] for number in numbers if self.entry(number) is None]
        self.use(numbers)

    @rule(numbers=parts_of_prompts())
    def pin(self, numbers: list[int]) -> None:
        found = self.host.pin(keys(*numbers))
        assert [chunk is not None for chunk in found] == [self.entry(n) is not None for n in numbers]
        for number, chunk in zip(numbers, found, strict=True):
            entry = self.entry(number)
            if entry is not None and chunk is not None:
                entry[1] += 1
                self.pinned.append((number, chunk))
        self.use(numbers)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        number, chunk = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.host.unpin([chunk])
        entry = self.entry(number)
        assert entry is not None, "a pinned chunk is never evicted"
        entry[1] -= 1

    @precondition(lambda self: self.pinned)
    @rule()
    def share(self) -> None:
        number, chunk = self.pinned[-1]
        self.pool.share(chunk.pages[:1])
        self.shared.append((number, chunk))
        entry = self.entry(number)
        assert entry is not None
        entry[2] += 1

    @precondition(lambda self: self.shared)
    @rule()
    def end_share(self) -> None:
        number, chunk = self.shared.pop()
        self.pool.release(chunk.pages[:1])
        entry = self.entry(number)
        assert entry is not None, "a chunk whose pages would not become free is not evicted"
        entry[2] -= 1

    @rule(num_pages=st.integers(0, 9))
    def evict(self, num_pages: int) -> None:
        free = [entry[0] for entry in self.model if entry[1:] == [0, 0]]
        orphans = [number for number in free if self.is_orphan(number)]
        others = [number for number in free if number not in orphans]
        enough = len(free) * NUM_LAYERS >= num_pages
        assert self.host.evict(num_pages) is enough
        if not enough:
            return
        gone = {entry[0] for entry in self.model} - set(here(self.host, *PARENTS))
        wanted = -(-num_pages // NUM_LAYERS)
        assert len(gone) == wanted
        assert gone >= set(orphans) or gone <= set(orphans), "those that lack one before them go first"
        assert gone - set(orphans) == set(others[: max(0, wanted - len(orphans))])
        self.model = [entry for entry in self.model if entry[0] not in gone]

    @invariant()
    def what_is_there_is_what_the_model_says(self) -> None:
        assert list(self.host._order._parents) == keys(*(entry[0] for entry in self.model))
        assert set(self.host._order._orphans) == {key(n) for n, *_ in self.model if self.is_orphan(n)}
        assert len(self.host) == len(self.host._order) == len(set(self.host._order))
        assert self.host.pins == len(self.pinned)
        assert self.pool.pages_in_use == len(self.model) * NUM_LAYERS
        assert self.pool.references == len(self.model) * NUM_LAYERS + len(self.shared)


TestHostTier = HostTierMachine.TestCase
TestHostTier.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_pages_of_a_pinned_chunk_keep_their_bytes_while_threads_insert_and_evict() -> None:
    pool = HostPool(CPU(), PAGE_BYTES, 16 * 4096, 4 * 4096)
    host = HostTier(pool)
    faults: list[str] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(250):
            number = int(random.integers(12))
            [chunk] = host.pin(keys(number))
            if chunk is not None:
                found = [pool.page(page).tolist() for page in chunk.pages.tolist()]
                if found != [[number + 1] * PAGE_BYTES, [number + 101] * PAGE_BYTES]:
                    faults.append(f"chunk {number} holds {found}")
                host.unpin([chunk])
                continue
            pages = pool.allocate(NUM_LAYERS)
            if pages is None:
                host.evict(pool.shortage(NUM_LAYERS))
                continue
            for layer, page in enumerate(pages.tolist()):
                pool.page(page).fill_(number + 1 + 100 * layer)
            host.insert([key(number)], [Chunk(pages)])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert host.evicted > 0
    assert host.pins == 0
    assert pool.pages_in_use == pool.references == len(host) * NUM_LAYERS


class TestPinPrefix:
    def test_the_leading_ones_that_are_here_are_pinned_and_no_others(
        self, host: HostTier, pool: HostPool
    ) -> None:
        first, second, _ = insert(host, pool, 1, 2, 4)
        assert host.pin_prefix(keys(1, 2, 3, 4)) == [first, second]
        assert host.pin_prefix(keys(3, 4)) == []
        assert host.pin_prefix([]) == []
        assert host.pins == 2
        host.unpin([first, second])

    def test_they_are_not_used_before_that_is_said(self, host: HostTier, pool: HostPool) -> None:
        insert(host, pool, 1, 2)
        insert(host, pool, 5)
        host.unpin(host.pin_prefix(keys(1, 2)))
        assert host.evict(1)
        assert here(host, 1, 2, 5) == [1, 5]

    def test_there_are_none_after_close(self, host: HostTier, pool: HostPool) -> None:
        insert(host, pool, 1)
        host.close()
        assert host.pin_prefix(keys(1)) == []
