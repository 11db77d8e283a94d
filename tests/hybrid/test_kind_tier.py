"""Whole chunks of a kind: all pages of all pieces, which come and go together."""

from __future__ import annotations

import numpy as np
import pytest

from lwkv.hybrid.host_tier import HybridHostTier, KindShape, Piece
from lwkv.hybrid.kind_tier import KindTier
from lwkv.hybrid.units import Reach, UnitKey
from lwkv.keys import ChunkKey
from lwkv.platforms.protocol import Int64s
from lwkv.storage.host_tier import Chunk

PIECES = (2, 1)


class Pages:
    """As much of a pool as the tier asks for."""

    def __init__(self) -> None:
        self.references: dict[int, int] = {}

    def take(self, *pages: int) -> Int64s:
        self.share(np.array(pages))
        return np.array(pages, np.int64)

    def share(self, pages: Int64s) -> None:
        for page in pages.tolist():
            self.references[page] = self.references.get(page, 0) + 1

    def release(self, pages: Int64s) -> None:
        for page in pages.tolist():
            self.references[page] -= 1

    def shared(self, pages: Int64s) -> np.ndarray:
        return np.array([self.references[page] > 1 for page in pages.tolist()], bool)

    @property
    def in_use(self) -> set[int]:
        return {page for page, count in self.references.items() if count}


def key(number: int) -> ChunkKey:
    return ChunkKey("kind", bytes([number]) * 16)


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def tier(pages: Pages) -> HybridHostTier:
    return HybridHostTier(pages, {0: KindShape(len(PIECES), Reach(None))}, 0)


def test_what_a_lower_tier_brings_is_the_pieces_that_groups_find(tier: HybridHostTier, pages: Pages) -> None:
    kind = KindTier(tier, 0, PIECES)
    kind.insert([key(1)], [Chunk(pages.take(7, 8, 9))])
    found = tier.pin([Piece(UnitKey(key(1).hash, 0), slot) for slot in range(2)])
    assert [chunk.pages.tolist() for chunk in found if chunk is not None] == [[7, 8], [9]]


def test_a_chunk_is_pinned_whole_or_not_at_all(tier: HybridHostTier, pages: Pages) -> None:
    kind = KindTier(tier, 0, PIECES)
    tier.insert([Piece(UnitKey(key(1).hash, 0), 1)], [Chunk(pages.take(9))], [None])
    assert (kind.contains([key(1)]), kind.pin([key(1)]), tier.pins) == ([False], [None], 0)
    kind.insert([key(1)], [Chunk(pages.take(1, 2, 3))])
    assert pages.in_use == {1, 2, 9}, "the piece that was here stays, and the other one goes back"
    (chunk,) = kind.pin([key(1)])
    assert chunk is not None
    assert chunk.pages.tolist() == [1, 2, 9]
    assert not tier.evict(1)
    kind.unpin([chunk])
    assert tier.evict(1)
    assert not pages.in_use


def test_what_becomes_whole_is_shared_once_with_the_chunk_before_it(
    tier: HybridHostTier, pages: Pages
) -> None:
    first, second = (Piece(UnitKey(key(2).hash, 0), slot) for slot in range(2))
    assert not tier.insert([second], [Chunk(pages.take(3))], [key(1).hash], shares=True)
    (unit,) = tier.insert([first], [Chunk(pages.take(1, 2))], [None], shares=True)
    assert (unit.key.hash, unit.pages.tolist(), unit.before) == (key(2).hash, [1, 2, 3], key(1).hash)
    assert not tier.evict(1), "its pages are read"
    pages.release(unit.pages)
    assert tier.evict(1)
