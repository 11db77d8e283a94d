"""The host tier as the tiers below it see it: whole chunks of one kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from lwkv.hybrid.host_tier import HybridHostTier, Piece
from lwkv.hybrid.tier_view import TierView
from lwkv.hybrid.units import UnitKey
from lwkv.keys import ChunkKey
from lwkv.storage.host_tier import Chunk
from lwkv.storage.prefix_order import parents_of


@dataclass(slots=True, eq=False)
class WholeChunk(Chunk):
    """All pages of a chunk of a kind, and the pieces that have them."""

    pieces: Sequence[Chunk] = ()


class KindTier(TierView):
    """A HostChunks whose chunks are those of a kind, each with the pages of all of its pieces in order.

    Args:
        piece_pages: how many pages each piece has, in order.
    """

    def __init__(self, tier: HybridHostTier, kind: int, piece_pages: Sequence[int]) -> None:
        super().__init__(tier, kind)
        self._cuts = [*accumulate(piece_pages)][:-1]

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self._tier.are_whole(self._units(keys))

    def pin(self, keys: Sequence[ChunkKey]) -> list[Chunk | None]:
        found = self._tier.pin_whole(self._units(keys))
        return [None if pieces is None else _whole(pieces) for pieces in found]

    def use(self, keys: Sequence[ChunkKey]) -> None:
        self._tier.use(self._units(keys))

    def unpin(self, chunks: Sequence[Chunk]) -> None:
        self._tier.unpin([p for chunk in chunks if isinstance(chunk, WholeChunk) for p in chunk.pieces])

    def insert(
        self,
        keys: Sequence[ChunkKey],
        chunks: Sequence[Chunk],
        parents: Sequence[ChunkKey | None] | None = None,
    ) -> None:
        pieces: list[Piece] = []
        parts: list[Chunk] = []
        before: list[bytes | None] = []
        for key, chunk, parent in zip(keys, chunks, parents or parents_of(keys), strict=True):
            for slot, pages in enumerate(np.split(chunk.pages, self._cuts)):
                pieces.append(Piece(UnitKey(key.hash, self._kind), slot))
                parts.append(Chunk(pages))
                before.append(None if parent is None else parent.hash)
        self._tier.insert(pieces, parts, before)

    def close(self) -> None:
        """Nothing: the engines of the groups close the tier."""

    def _units(self, keys: Sequence[ChunkKey]) -> list[UnitKey]:
        return [UnitKey(key.hash, self._kind) for key in keys]


def _whole(pieces: Sequence[Chunk]) -> Chunk:
    return WholeChunk(np.concatenate([piece.pages for piece in pieces]), pieces=pieces)
