"""What is the same however an engine sees the host tier of all kinds."""

from __future__ import annotations

from collections.abc import Sequence

from lwkv.hybrid.host_tier import HybridHostTier
from lwkv.keys import ChunkKey
from lwkv.storage.host_tier import Chunk, Watcher
from lwkv.storage.prefix_order import leading


class TierView:
    """Of a HostChunks what does not depend on what its chunks are.

    What is used, and in which order things go, is the matter of the tier of all groups.

    Args:
        kind: of which chunks are seen.
    """

    watcher: Watcher | None = None

    def __init__(self, tier: HybridHostTier, kind: int) -> None:
        self._tier = tier
        self._kind = kind

    def __len__(self) -> int:
        return len(self._tier)

    @property
    def pins(self) -> int:
        return self._tier.pins

    @property
    def evicted(self) -> int:
        return self._tier.evicted

    def announce(self) -> None:
        """Nothing: nobody has to be asked."""

    def pin(self, keys: Sequence[ChunkKey]) -> list[Chunk | None]:
        raise NotImplementedError

    def pin_prefix(self, keys: Sequence[ChunkKey]) -> list[Chunk]:
        found = self.pin(keys)
        chunks = leading(found)
        self.unpin([chunk for chunk in found[len(chunks) :] if chunk is not None])
        return chunks

    def use(self, keys: Sequence[ChunkKey]) -> None:
        """Nothing: a hit of all kinds is noted when it is pinned."""

    def unpin(self, chunks: Sequence[Chunk]) -> None:
        self._tier.unpin(chunks)

    def is_settled(self) -> bool:
        return True

    def evictable(self) -> int:
        return self._tier.evictable()

    def evict(self, num_pages: int) -> bool:
        return self._tier.evict(num_pages)
