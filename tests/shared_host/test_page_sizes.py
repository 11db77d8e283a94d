"""Engines with pages of several sizes on one owner: each has its bytes, and the memory is shared by use."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from shared_host.owners import OwnerThread, owner_at, session_at
from storage.rig import keys

from lwkv.errors import ConfigError
from lwkv.platforms.cpu import CPU
from lwkv.shared_host.client.pool import NodePool
from lwkv.shared_host.client.tier import NodeTier
from lwkv.storage import Chunk
from lwkv.telemetry.counters import Counters

SMALL, LARGE = 4096, 3 * 4096
SLAB = 8 * 4096
"""Has 8 small pages, or 2 large ones."""

NUM_SLABS = 6


class Engine:
    """A pool and a tier, without a keeper; every chunk has bytes of its own."""

    def __init__(self, path: Path, stride: int) -> None:
        self.stride = stride
        self.session = session_at(path, stride)
        self.pool = NodePool(CPU(), stride, self.session, Counters(), locks_ahead=False)
        self.tier = NodeTier(self.pool)

    def store(self, number: int, num_pages: int = 2) -> bool:
        pages = self.pool.allocate(num_pages)
        if pages is None:
            return False
        for page in pages.tolist():
            self.pool.page(page).fill_((7 * number + self.stride // 4096) % 251)
        self.tier.insert(keys(number), [Chunk(pages)])
        return True

    def load(self, number: int) -> bool:
        """Whether it is there; its bytes are checked then."""
        (chunk,) = self.tier.pin(keys(number))
        if chunk is None:
            return False
        for page in chunk.pages.tolist():
            assert set(self.pool.page(page).unique().tolist()) == {(7 * number + self.stride // 4096) % 251}
        self.tier.unpin([chunk])
        return True

    def there(self, numbers: range) -> list[int]:
        found = self.tier.contains([key for number in numbers for key in keys(number)])
        return [number for number, there in zip(numbers, found, strict=True) if there]

    def close(self) -> None:
        self.tier.close()
        self.pool.close()
        self.session.connection.tend()
        self.session.connection.close()
        self.session.connection.release()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[OwnerThread]:
    owner = OwnerThread(tmp_path / "host.sock", NUM_SLABS * SLAB, SLAB)
    yield owner
    owner.end()


@pytest.fixture
def engines(owner: OwnerThread, tmp_path: Path) -> Iterator[tuple[Engine, Engine]]:
    with ExitStack() as undo:
        both = []
        for stride in (SMALL, LARGE):
            both.append(Engine(tmp_path / "host.sock", stride))
            undo.callback(both[-1].close)
        yield both[0], both[1]


def test_both_find_what_they_stored_with_its_bytes(
    owner: OwnerThread, engines: tuple[Engine, Engine]
) -> None:
    small, large = engines
    for number in range(1, 4):
        assert small.store(number)
        assert large.store(100 + number)
    assert all(small.load(number) for number in range(1, 4))
    assert all(large.load(100 + number) for number in range(1, 4))
    assert large.there(range(1, 4)) == []
    status = owner.server.status()
    assert (status["page_sizes"], status["chunks"]) == (2, 6)
    assert status["bytes_in_use"] == 3 * 2 * (SMALL + LARGE)


def test_one_size_alone_has_all_of_the_memory_and_gives_the_oldest_to_another_that_comes(
    engines: tuple[Engine, Engine],
) -> None:
    small, large = engines
    in_all = NUM_SLABS * SLAB // SMALL // 2
    assert all(small.store(number) for number in range(in_all))
    assert small.there(range(in_all)) == list(range(in_all))
    assert large.store(100)
    # A slab has four chunks of two small pages: the first four went.
    assert small.there(range(in_all)) == list(range(4, in_all))
    assert large.load(100)
    assert small.load(4)
    assert large.store(101)
    assert small.there(range(in_all)) == [*range(4, 8), *range(12, in_all)], "those used longest ago went"


def test_two_sizes_that_store_all_the_time_both_have_a_share(engines: tuple[Engine, Engine]) -> None:
    small, large = engines
    for number in range(200):
        assert small.store(number)
        assert large.store(1000 + number)
    # As many chunks of both were used lately: of three slabs large ones have a chunk each, four have small.
    assert len(large.there(range(1000, 1200))) >= NUM_SLABS - 2
    assert len(small.there(range(200))) >= 4


def test_pages_that_somebody_uses_are_never_cut_anew(engines: tuple[Engine, Engine]) -> None:
    small, large = engines
    in_all = NUM_SLABS * SLAB // SMALL // 2
    assert all(small.store(number) for number in range(in_all))
    held = small.tier.pin([key for slab in range(NUM_SLABS) for key in keys(4 * slab)])
    assert not large.store(100), "a chunk of every slab is pinned"
    assert large.pool.available == 0
    small.tier.unpin([chunk for chunk in held if chunk is not None])
    writing = small.pool.allocate(2)
    assert writing is not None
    assert all(large.store(100 + number) for number in range(NUM_SLABS - 1))
    assert not large.store(200, 3 * NUM_SLABS), "more than all that there is"
    small.pool.page(int(writing[0])).fill_(5)
    assert all(large.load(100 + number) for number in range(1, NUM_SLABS - 1))
    small.pool.release(writing)


def test_a_size_that_nobody_has_any_more_leaves_no_slab_behind(
    owner: OwnerThread, engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    small, large = engines
    pages = small.pool.allocate(3)
    assert pages is not None
    small.pool.release(pages)
    small.close()
    with closing(Engine(tmp_path / "host.sock", 2 * SMALL)):
        assert owner.server.status()["page_sizes"] == 2
        in_all = NUM_SLABS * (SLAB // LARGE) // 2
        assert all(large.store(100 + number) for number in range(in_all))
        assert large.there(range(100, 100 + in_all)) == list(range(100, 100 + in_all))


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_stored_and_loaded_the_bytes_are_right_and_nothing_is_lost(
    owner: OwnerThread, engines: tuple[Engine, Engine], seed: int
) -> None:
    drawn = random.Random(seed)
    held: list[tuple[Engine, list[Chunk]]] = []
    for _ in range(400):
        engine = drawn.choice(engines)
        number = drawn.randrange(20)
        what = drawn.randrange(4)
        if what == 0 and not engine.there(range(number, number + 1)):
            engine.store(number, drawn.randrange(1, 4))
        elif what == 1:
            engine.load(number)
        elif what == 2 and len(held) < 3:
            held.append((engine, [chunk for chunk in engine.tier.pin(keys(number)) if chunk is not None]))
        elif held:
            other, chunks = held.pop(drawn.randrange(len(held)))
            other.tier.unpin(chunks)
    for engine, chunks in held:
        engine.tier.unpin(chunks)
    for engine in engines:
        assert engine.tier.is_settled()
    indexes = owner.server._indexes
    there = [index.pages.num_there * stride for stride, index in indexes.items()]
    assert sum(there) <= NUM_SLABS * SLAB
    for index in indexes.values():
        in_chunks = sum(len(chunk.pages) for chunk in index.tier._chunks.values())
        assert index.pages.references == index.state().pages_in_use == in_chunks
        taken = np.concatenate([np.zeros(0, int), *(c.pages for c in index.tier._chunks.values())])
        assert len(set(taken.tolist())) == len(taken)


def test_pages_of_an_owner_whose_memory_is_larger_than_a_slab_follow_those_of_one_that_was_smaller(
    tmp_path: Path,
) -> None:
    path = tmp_path / "host.sock"
    with owner_at(path, 4), closing(Engine(path, SMALL)) as engine:
        assert engine.store(1)
        engine.session.connection.close()
        engine.session.connection.release()
        engine.pool.detach()
        with owner_at(tmp_path / "next.sock", 14):
            engine.session = session_at(tmp_path / "next.sock")
            engine.pool.attach(engine.session)
            pages = engine.pool.allocate(14)
            assert pages is not None
            starts = [engine.pool.page(page).data_ptr() for page in pages.tolist()]
            first = engine.session.memory.data_ptr()
            assert sorted(starts) == list(range(first, first + 14 * SMALL, SMALL))
            engine.pool.release(pages)
            assert engine.store(2)
            assert engine.load(2)


def test_an_owner_whose_slabs_have_another_size_is_refused(tmp_path: Path) -> None:
    other = OwnerThread(tmp_path / "next.sock", 4 * SLAB, 2 * SLAB)
    with owner_at(tmp_path / "host.sock", 4), closing(Engine(tmp_path / "host.sock", SMALL)) as engine:
        engine.pool.detach()
        session = session_at(tmp_path / "next.sock")
        with pytest.raises(ConfigError, match="has 16 pages in a slab, the last one had 6"):
            engine.pool.attach(session)
        assert session.connection.is_lost
    other.end()
