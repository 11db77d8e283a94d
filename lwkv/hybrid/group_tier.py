"""The host tier as the engine of one group of layers sees it."""

from __future__ import annotations

from collections.abc import Sequence

from lwkv.hybrid.host_tier import HybridHostTier, Piece
from lwkv.hybrid.units import UnitKey
from lwkv.keys import ChunkKey
from lwkv.storage.host_tier import Chunk, Watcher
from lwkv.storage.prefix_order import parents_of


class GroupTier:
    """A HostChunks whose chunks are one group's pieces of the chunks of a kind.

    What is used, and in which order things go, is the matter of the tier of all groups.

    Args:
        namespaces: of the keys of the group's pieces, in order.
        first_slot: the number of the first of these pieces among those of all groups of the kind.
    """

    watcher: Watcher | None = None

    def __init__(self, tier: HybridHostTier, kind: int, namespaces: Sequence[str], first_slot: int) -> None:
        self._tier = tier
        self._kind = kind
        self._slots = {namespace: first_slot + number for number, namespace in enumerate(namespaces)}

    def __len__(self) -> int:
        return len(self._tier)

    @property
    def pins(self) -> int:
        return self._tier.pins

    @property
    def evicted(self) -> int:
        return self._tier.evicted

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self._tier.contains(self._pieces(keys))

    def announce(self) -> None:
        """Nothing: nobody has to be asked."""

    def pin(self, keys: Sequence[ChunkKey]) -> list[Chunk | None]:
        return self._tier.pin(self._pieces(keys))

    def pin_prefix(self, keys: Sequence[ChunkKey]) -> list[Chunk]:
        found = self.pin(keys)
        length = found.index(None) if None in found else len(found)
        self.unpin([chunk for chunk in found[length:] if chunk is not None])
        return [chunk for chunk in found[:length] if chunk is not None]

    def use(self, keys: Sequence[ChunkKey]) -> None:
        """Nothing: a hit of all kinds is noted when it is pinned."""

    def unpin(self, chunks: Sequence[Chunk]) -> None:
        self._tier.unpin(chunks)

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
        self._tier.insert(self._pieces(keys), chunks, before)

    def is_settled(self) -> bool:
        return True

    def evictable(self) -> int:
        return self._tier.evictable()

    def evict(self, num_pages: int) -> bool:
        return self._tier.evict(num_pages)

    def close(self) -> None:
        self._tier.close()

    def _pieces(self, keys: Sequence[ChunkKey]) -> list[Piece]:
        return [Piece(UnitKey(key.hash, self._kind), self._slots[key.namespace]) for key in keys]
