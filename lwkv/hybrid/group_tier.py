"""The host tier as the engine of one group of layers sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lwkv.hybrid.host_tier import HybridHostTier, Piece, WholeUnit
from lwkv.hybrid.tier_view import TierView
from lwkv.hybrid.units import UnitKey
from lwkv.keys import ChunkKey
from lwkv.storage.host_tier import Chunk
from lwkv.storage.prefix_order import parents_of


class GroupTier(TierView):
    """A HostChunks whose chunks are one group's pieces of the chunks of a kind.

    Args:
        namespaces: of the keys of the group's pieces, in order.
        first_slot: the number of the first of these pieces among those of all groups of the kind.
        pass_on: takes over what became whole here, with references to its pages; None for nobody.
    """

    def __init__(
        self,
        tier: HybridHostTier,
        kind: int,
        namespaces: Sequence[str],
        first_slot: int,
        pass_on: Callable[[Sequence[WholeUnit]], None] | None = None,
    ) -> None:
        super().__init__(tier, kind)
        self._slots = {namespace: first_slot + number for number, namespace in enumerate(namespaces)}
        self._pass_on = pass_on

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self._tier.contains(self._pieces(keys))

    def pin(self, keys: Sequence[ChunkKey]) -> list[Chunk | None]:
        return self._tier.pin(self._pieces(keys))

    def insert(
        self,
        keys: Sequence[ChunkKey],
        chunks: Sequence[Chunk],
        parents: Sequence[ChunkKey | None] | None = None,
    ) -> None:
        before = [
            None if parent is None or parent.hash == key.hash else parent.hash
            for key, parent in zip(keys, parents or parents_of(keys), strict=True)
        ]
        whole = self._tier.insert(self._pieces(keys), chunks, before, shares=self._pass_on is not None)
        if self._pass_on is not None and whole:
            self._pass_on(whole)

    def close(self) -> None:
        self._tier.close()

    def _pieces(self, keys: Sequence[ChunkKey]) -> list[Piece]:
        return [Piece(UnitKey(key.hash, self._kind), self._slots[key.namespace]) for key in keys]
