"""A hold's pages: each goes one way, once, whatever arrives before or after the release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from storage.rig import key

from lwkv.platforms.protocol import Int64s
from lwkv.storage.hold import Found, Hold, LayerFetch
from lwkv.storage.host_tier import Chunk
from lwkv.storage.tier import Missing
from lwkv.storage.tier_answers import FILLED

LAYERS = 3


class Places:
    """Where the pages of a hold went, and chunks of which some are in host memory."""

    def __init__(self, in_host: Sequence[bool], tiers: Sequence[Any] = ("disk",)) -> None:
        self.unpinned: list[Chunk] = []
        self.promoted: dict[int, list[int]] = {}
        self.given_back: list[int] = []
        self.refuses_chunks = False
        self._first_of_lower = 100
        found = [
            Found(key(i), Chunk(np.arange(LAYERS) + 10 * i))
            if there
            else Found(key(i), tier=tiers[i % len(tiers)])
            for i, there in enumerate(in_host)
        ]
        self.pinned = [item.chunk for item in found if item.chunk is not None]
        self.hold = Hold(found, LAYERS, self.unpinned.extend, self._promote, self._give_back)

    def _promote(self, found: Sequence[Found], chunks: Sequence[Chunk]) -> None:
        if self.refuses_chunks:
            raise MemoryError("says the test")
        for item, chunk in zip(found, chunks, strict=True):
            assert item.chunk is None, "it is in host memory already"
            self.promoted[self.hold.found.index(item)] = chunk.pages.tolist()

    def _give_back(self, pages: Int64s) -> None:
        self.given_back += pages.tolist()

    def new_pages(self, count: int) -> Int64s:
        self._first_of_lower += count
        return np.arange(self._first_of_lower - count, self._first_of_lower)


@given(st.lists(st.booleans(), min_size=1, max_size=5), st.data())
def test_every_page_is_promoted_or_given_back_once(in_host: list[bool], data: st.DataObject) -> None:
    """Chunks with all layers become chunks of host memory; every other page goes back."""
    places = Places(in_host)
    positions = np.flatnonzero(~places.hold.in_host)
    released_before = data.draw(st.integers(0, LAYERS))
    arrived = np.zeros((LAYERS, len(positions)), bool)
    taken: list[int] = []
    for layer in range(LAYERS):
        if layer == released_before:
            places.hold.release()
        pages = places.new_pages(len(positions))
        filled = np.array([data.draw(st.sampled_from([True, True, False])) for _ in positions], bool)
        places.hold.arrived(layer, positions, pages, filled)
        arrived[layer] = filled & (layer < released_before)
        taken += pages.tolist()
    places.hold.release()
    places.hold.release()
    whole = [int(i) for i in positions[arrived.all(axis=0)]]
    assert sorted(places.promoted) == whole
    promoted = [page for pages in places.promoted.values() for page in pages]
    assert Counter(promoted + places.given_back) == Counter(taken)
    assert places.unpinned == places.pinned


def test_a_chunk_that_cannot_be_promoted_leaves_no_pin_and_no_page_behind() -> None:
    places = Places([True, False, False])
    places.refuses_chunks = True
    for layer in range(LAYERS):
        pages = places.new_pages(2)
        places.hold.arrived(layer, np.array([1, 2]), pages, np.array([True, layer != 1]))
    with pytest.raises(MemoryError):
        places.hold.release()
    assert places.unpinned == places.pinned
    assert len(places.given_back) == LAYERS, "the one that failed, and the two of its chunk that had come"


def test_each_tier_is_named_once_with_its_chunks_in_order() -> None:
    lower = Places([True, False, False, False], tiers=("disk", "remote")).hold.lower
    assert [(tier, keys, positions.tolist()) for tier, keys, positions in lower] == [
        ("remote", [key(1), key(3)], [1, 3]),
        ("disk", [key(2)], [2]),
    ]


def test_pages_of_all_layers_are_known_only_if_all_chunks_are_in_host_memory() -> None:
    pages = Places([True, True]).hold.all_pages()
    assert pages is not None
    assert pages.tolist() == [[layer, 10 + layer] for layer in range(LAYERS)]
    assert Places([True, False]).hold.all_pages() is None
    assert Places([True, False]).hold.host_pages(1).tolist() == [1, Missing.LATE]


def test_a_layer_is_there_when_each_of_its_parts_has_ended_well_or_badly() -> None:
    places = Places([True, False, False, False, False])
    fetch = LayerFetch(places.hold, 2, 3)
    good: Future[Int64s] = Future()
    bad: Future[Int64s] = Future()
    fetch.watch(good, np.array([1, 2]), np.array([101, 102]))
    fetch.watch(bad, np.array([3]), np.array([103]))
    fetch.lacks_memory(np.array([4]))
    bad.set_exception(RuntimeError("says the test"))
    assert not fetch.future.done()
    good.set_result(np.array([FILLED, Missing.MISS]))
    assert fetch.future.done()
    assert fetch.future.result().pages.tolist() == [2, 101, Missing.MISS, Missing.ERROR, Missing.NO_MEMORY]
    assert sorted(places.given_back) == [102, 103]
    assert places.hold.fetched[2].tolist() == [Missing.LATE, 101, *[Missing.LATE] * 3]


def test_a_layer_of_host_memory_alone_is_there_at_once() -> None:
    fetch = LayerFetch(Places([True, True]).hold, 1, 0)
    assert fetch.future.result(0).pages.tolist() == [1, 11]


def test_a_part_that_was_cancelled_is_an_error_of_its_chunks() -> None:
    fetch = LayerFetch(Places([False]).hold, 0, 1)
    part: Future[Int64s] = Future()
    fetch.watch(part, np.array([0]), np.array([100]))
    part.cancel()
    assert fetch.future.result(0).pages.tolist() == [Missing.ERROR]
