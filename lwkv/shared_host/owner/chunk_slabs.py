"""Which chunks have pages in which slab."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lwkv.keys import ChunkKey


class ChunkSlabs:
    """The slabs of each chunk, and the chunks of each slab. For one thread."""

    def __init__(self) -> None:
        self._slabs_of: dict[ChunkKey, tuple[int, ...]] = {}
        self._chunks_in: dict[int, set[ChunkKey]] = {}

    def add(self, key: ChunkKey, slabs: Iterable[int]) -> None:
        """Note a chunk that is new."""
        self._slabs_of[key] = tuple(set(slabs))
        for slab in self._slabs_of[key]:
            self._chunks_in.setdefault(slab, set()).add(key)

    def remove(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            for slab in self._slabs_of.pop(key, ()):
                self._chunks_in[slab].discard(key)

    def of(self, keys: Sequence[ChunkKey]) -> set[int]:
        """The slabs of those chunks that are known."""
        return {slab for key in keys for slab in self._slabs_of.get(key, ())}

    def chunks_in(self, slab: int) -> list[ChunkKey]:
        return list(self._chunks_in.get(slab, ()))
