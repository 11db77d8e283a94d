from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from shared_host.owners import evict, evictable, owner_at, watched_node
from storage.rig import PAGE_BYTES, key, keys

from lwkv.keys import ChunkKey
from lwkv.platforms.cpu import CPU
from lwkv.platforms.protocol import Int64s
from lwkv.pool.host_pool import HostPool
from lwkv.shared_host.protocol import pack_keys
from lwkv.storage import Chunk, HostTier
from lwkv.storage.host_tier import HostChunks
from lwkv.storage.prefix_order import PrefixOrder

NUM_LAYERS = 2


@pytest.fixture
def own_pool() -> HostPool:
    return HostPool(CPU(), PAGE_BYTES, 20 * 4096, 6 * 4096)


@pytest.fixture
def own_host(own_pool: HostPool) -> HostTier:
    return HostTier(own_pool)


@pytest.fixture(params=["of the process", "of a node"])
def host_and_pool(
    request: Any, own_host: HostTier, own_pool: HostPool, tmp_path: Path
) -> Iterator[tuple[HostChunks, HostPool]]:
    """Host memory of both kinds, of the same size, with one contract."""
    if request.param == "of the process":
        yield own_host, own_pool
    else:
        with owner_at(tmp_path / "host.sock", 20) as owner, watched_node(owner, PAGE_BYTES) as node:
            yield node


@pytest.fixture
def host(host_and_pool: tuple[HostChunks, HostPool]) -> HostChunks:
    return host_and_pool[0]


@pytest.fixture
def pool(host_and_pool: tuple[HostChunks, HostPool]) -> HostPool:
    return host_and_pool[1]


def same(chunk: Chunk | None, other: Chunk | None) -> bool:
    """Whether both are the same pages."""
    return chunk is not None and other is not None and chunk.pages.tolist() == other.pages.tolist()


def make_chunk(pool: HostPool) -> Chunk:
    pages = pool.allocate(NUM_LAYERS)
    assert pages is not None
    return Chunk(pages)


def insert(host: HostChunks, pool: HostPool, *numbers: int) -> list[Chunk]:
    chunks = [make_chunk(pool) for _ in numbers]
    host.insert(keys(*numbers), chunks)
    return chunks


def read_elsewhere(host: HostChunks, pool: HostPool, number: int) -> Chunk:
    """A chunk whose pages have one more reference, taken while it was pinned."""
    [chunk] = host.pin(keys(number))
    assert chunk is not None
    pool.share(chunk.pages)
    host.unpin([chunk])
    return chunk


def here(host: HostChunks, *numbers: int) -> list[int]:
    return [n for n, there in zip(numbers, host.contains(keys(*numbers)), strict=True) if there]


def test_a_chunk_is_there_with_all_its_pages_after_insert_and_gone_with_all_after_evict(
    host: HostChunks, pool: HostPool
) -> None:
    insert(host, pool, 1, 2)
    assert host.contains(keys(0, 1, 2)) == [False, True, True]
    assert (len(host), pool.references) == (2, 4)
    assert evict(host, 1)
    assert (len(host), pool.references, host.evicted) == (1, 2, 1)


def test_chunks_deep_in_a_prefix_go_first(host: HostChunks, pool: HostPool) -> None:
    insert(host, pool, 1, 2, 3)
    assert evict(host, 1)
    assert here(host, 1, 2, 3) == [1, 2]
    assert evict(host, 1)
    assert here(host, 1, 2, 3) == [1]


def test_the_least_recently_pinned_go_first(host: HostChunks, pool: HostPool) -> None:
    insert(host, pool, 1)
    insert(host, pool, 2, 3)
    host.unpin([chunk for chunk in host.pin(keys(1)) if chunk])
    order = []
    while len(host):
        before = here(host, 1, 2, 3)
        assert evict(host, 1)
        order += sorted(set(before) - set(here(host, 1, 2, 3)))
    assert order == [3, 2, 1]


def test_what_is_found_is_neither_pinned_nor_used(own_host: HostTier, own_pool: HostPool) -> None:
    first, second = insert(own_host, own_pool, 1), insert(own_host, own_pool, 2)
    own_host.announce()
    assert own_host.find(keys(1, 9, 2)) == [*first, None, *second]
    assert own_host.pins == 0
    assert own_host.evict(1)
    assert here(own_host, 1, 2) == [2], "the one that was stored first"


def test_eviction_frees_what_is_asked_or_nothing(host: HostChunks, pool: HostPool) -> None:
    insert(host, pool, 1, 2, 3)
    [pinned] = host.pin(keys(3))
    assert not evict(host, 5)
    assert here(host, 1, 2, 3) == [1, 2, 3]
    assert evict(host, 3)
    assert here(host, 1, 2, 3) == [3]
    assert not evict(host, 1)
    assert pinned is not None
    host.unpin([pinned])
    assert evict(host, 2)
    assert (len(host), pool.references, host.evicted) == (0, 0, 3)


def test_what_can_be_evicted_is_what_is_neither_pinned_nor_read_elsewhere(
    host: HostChunks, pool: HostPool
) -> None:
    insert(host, pool, 1, 2, 3)
    second = read_elsewhere(host, pool, 2)
    pinned = host.pin(keys(3))
    assert evictable(host) == NUM_LAYERS
    assert not evict(host, NUM_LAYERS + 1)
    pool.release(second.pages)
    host.unpin([chunk for chunk in pinned if chunk])
    assert evictable(host) == 3 * NUM_LAYERS


def test_a_chunk_that_is_pinned_at_the_close_goes_with_its_last_pin(
    own_host: HostTier, own_pool: HostPool
) -> None:
    insert(own_host, own_pool, 1, 2)
    [first], [again] = own_host.pin(keys(1)), own_host.pin(keys(1))
    assert first is not None
    assert again is not None
    own_host.close()
    own_pool.close()
    assert (len(own_host), own_pool.references) == (1, NUM_LAYERS)
    own_host.unpin([first])
    assert own_pool.references == NUM_LAYERS
    own_host.unpin([again])
    assert (len(own_host), own_pool.references, own_pool.slabs.memory) == (0, 0, [])


class Diary:
    """A watcher that writes down what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, list[ChunkKey]]] = []

    def kept(self, keys: Sequence[ChunkKey]) -> None:
        self.lines.append(("kept", list(keys)))

    def dropped(self, keys: Sequence[ChunkKey]) -> None:
        self.lines.append(("dropped", list(keys)))


def test_a_watcher_is_told_what_comes_and_what_is_evicted_in_order(host: HostChunks, pool: HostPool) -> None:
    host.watcher = diary = Diary()
    insert(host, pool, 1, 2)
    assert evict(host, 1)
    insert(host, pool, 2)
    assert diary.lines == [("kept", keys(1, 2)), ("dropped", keys(2)), ("kept", keys(2))]


def test_nothing_is_evicted_for_no_page(host: HostChunks, pool: HostPool) -> None:
    insert(host, pool, 1)
    assert evict(host, 0)
    assert len(host) == 1


def test_a_chunk_that_is_being_read_elsewhere_stays_since_its_pages_would_not_become_free(
    host: HostChunks, pool: HostPool
) -> None:
    insert(host, pool, 1, 2)
    first = read_elsewhere(host, pool, 1)
    pool.release(first.pages[:1])
    assert not evict(host, 3)
    assert evict(host, 2)
    assert here(host, 1, 2) == [1]
    pool.release(first.pages[1:])
    assert evict(host, 2)
    assert pool.references == 0


def test_a_chunk_pinned_twice_is_kept_until_it_is_unpinned_twice(host: HostChunks, pool: HostPool) -> None:
    insert(host, pool, 1)
    [first], [second] = host.pin(keys(1)), host.pin(keys(1))
    assert same(first, second)
    assert first is not None
    assert second is not None
    assert host.pins == 2
    host.unpin([first])
    assert not evict(host, 1)
    host.unpin([second])
    assert host.pins == 0
    assert evict(host, 1)


def test_pin_finds_what_is_there_in_the_order_asked(host: HostChunks, pool: HostPool) -> None:
    [first, third] = insert(host, pool, 1, 3)
    found = host.pin(keys(3, 2, 1))
    assert same(found[0], third)
    assert found[1] is None
    assert same(found[2], first)
    host.unpin([chunk for chunk in found if chunk])


def test_a_chunk_inserted_again_gives_its_pages_back_and_the_first_stays(
    host: HostChunks, pool: HostPool
) -> None:
    [first] = insert(host, pool, 1)
    insert(host, pool, 1, 2)
    [again] = host.pin(keys(1))
    assert same(again, first)
    assert again is not None
    host.unpin([again])
    assert (len(host), pool.references) == (2, 4)


def test_a_key_twice_in_one_insert_is_kept_once(host: HostChunks, pool: HostPool) -> None:
    insert(host, pool, 1, 2, 1)
    assert (len(host), pool.references) == (2, 4)


def test_close_drops_all_but_the_pinned_and_keeps_nothing_new(own_host: HostTier, own_pool: HostPool) -> None:
    insert(own_host, own_pool, 1, 2)
    [pinned] = own_host.pin(keys(2))
    own_host.close()
    assert here(own_host, 1, 2) == [2]
    insert(own_host, own_pool, 3)
    assert here(own_host, 1, 2, 3) == [2]
    assert own_pool.references == NUM_LAYERS
    assert pinned is not None
    own_host.unpin([pinned])
    own_host.close()
    assert (len(own_host), own_pool.references) == (0, 0)


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

    host: HostChunks
    pool: HostPool

    def __init__(self) -> None:
        super().__init__()
        self.open()
        self.model: list[list[int]] = []
        self.pinned: list[tuple[int, Chunk]] = []
        self.shared: list[tuple[int, Chunk]] = []

    def open(self) -> None:
        self.pool = HostPool(CPU(), PAGE_BYTES, 14 * 4096, 3 * 4096)
        self.own_host = self.host = HostTier(self.pool)

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
        pages = self.free_pages(NUM_LAYERS * len(numbers))
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
        assert evict(self.host, num_pages) is enough
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
        order = self.order()
        assert list(order._parents) == self.names(*(entry[0] for entry in self.model))
        assert set(order._orphans) == set(self.names(*(n for n, *_ in self.model if self.is_orphan(n))))
        assert len(self.host) == len(order) == len(set(order))
        assert self.host.pins == len(self.pinned)
        assert self.pool.pages_in_use == len(self.model) * NUM_LAYERS
        assert self.pool.references == len(self.model) * NUM_LAYERS + self.more_references()

    def free_pages(self, count: int) -> Int64s | None:
        """Pages for which nothing is evicted, if there are so many."""
        return self.pool.allocate(count)

    def order(self) -> PrefixOrder[ChunkKey]:
        return self.own_host._order

    def names(self, *numbers: int) -> list[ChunkKey]:
        return keys(*numbers)

    def more_references(self) -> int:
        """Those that are not the tier's own."""
        return len(self.shared)


class NodeTierMachine(HostTierMachine):
    """The same of the memory of a node."""

    def open(self) -> None:
        self.ending = ExitStack()
        folder = Path(self.ending.enter_context(TemporaryDirectory()))
        self.owner = self.ending.enter_context(owner_at(folder / "host.sock", 14))
        self.host, self.node = self.ending.enter_context(watched_node(self.owner, PAGE_BYTES))
        self.pool = self.node

    def teardown(self) -> None:
        self.ending.close()

    def free_pages(self, count: int) -> Int64s | None:
        free = self.node.index.pages.num_pages - self.node.index.state().pages_in_use
        return self.pool.allocate(count) if count <= free else None

    def order(self) -> PrefixOrder[ChunkKey]:
        self.node.settle()
        return self.node.index.tier._order

    def names(self, *numbers: int) -> list[ChunkKey]:
        return [ChunkKey("", pack_keys([key])) for key in keys(*numbers)]

    def more_references(self) -> int:
        used = {page for _, chunk in self.pinned for page in chunk.pages.tolist()}
        used |= {int(chunk.pages[0]) for _, chunk in self.shared}
        held = self.node._held
        assert set(np.flatnonzero(held).tolist()) == used, "a page is held as long as it is used here"
        return int(held.sum())


TestHostTier = HostTierMachine.TestCase
TestHostTier.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestNodeTier = NodeTierMachine.TestCase
TestNodeTier.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def test_pages_of_a_pinned_chunk_keep_their_bytes_while_threads_insert_and_evict(
    host: HostChunks, pool: HostPool
) -> None:
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
        self, host: HostChunks, pool: HostPool
    ) -> None:
        first, second, _ = insert(host, pool, 1, 2, 4)
        pinned = host.pin_prefix(keys(1, 2, 3, 4))
        assert len(pinned) == 2
        assert same(pinned[0], first)
        assert same(pinned[1], second)
        assert host.pin_prefix(keys(3, 4)) == []
        assert host.pin_prefix([]) == []
        assert host.pins == 2
        host.unpin(pinned)

    def test_they_are_not_used_before_that_is_said(self, host: HostChunks, pool: HostPool) -> None:
        insert(host, pool, 1, 2)
        insert(host, pool, 5)
        host.unpin(host.pin_prefix(keys(1, 2)))
        assert evict(host, 1)
        assert here(host, 1, 2, 5) == [1, 5]

    def test_there_are_none_after_close(self, host: HostChunks, pool: HostPool) -> None:
        insert(host, pool, 1)
        host.close()
        assert host.pin_prefix(keys(1)) == []
