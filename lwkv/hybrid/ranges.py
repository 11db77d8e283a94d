"""What is to be loaded and stored of a request, and which pieces of which chunks that is for each group."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lwkv.hybrid.page_size import stored_tokens
from lwkv.keys import ChunkKey
from lwkv.kinds import Kind
from lwkv.platforms.protocol import Int64s
from lwkv.request import KeyedSlots
from lwkv.transfer import NO_SLOT

Tables = Sequence[Sequence[int]]
"""For each group the block of tokens [i * block_size, (i + 1) * block_size), i = 0, 1, ...; 0 for none."""


@dataclass(frozen=True)
class Load:
    """A request that goes on at `boundary`.

    Args:
        hashes: of the prompt's chunks, in order. local: tokens that the engine has itself.
        tables: as they are when it is loaded; a null block is not written.
    """

    hashes: Sequence[bytes]
    local: int
    boundary: int
    tables: Tables


@dataclass(frozen=True)
class Store:
    """A request of which a step computes tokens [start, end).

    Full attention is stored of every chunk that ends there, other kinds as far as `boundaries` need them.
    What is known is not stored again, and nothing is of which a block is null.

    Args:
        boundaries: multiples of the chunk size up to `end`; None for the last one in (start, end]. A window
            is stored where all blocks of its chunks are still there, a state where the boundary is `end`.
        full_from: the token from which on full attention is stored; None for `start`.
    """

    hashes: Sequence[bytes]
    start: int
    end: int
    tables: Tables
    boundaries: Set[int] | None = None
    full_from: int | None = None


class Pieces:
    """How chunks of one group of layers are cut into pieces, each with a key and a page a layer.

    A piece's key has the chunk's hash, and its place in the chunk in the namespace.

    Args:
        tokens: of a piece. namespace: of the group. group: its number.

    Attributes:
        namespaces: of the keys of the pieces, in order; none where a chunk has no piece.
    """

    def __init__(self, kind: Kind, chunk_size: int, tokens: int, namespace: str, group: int) -> None:
        self.kind, self.group = kind, group
        self._chunk_size = chunk_size
        self._tokens = tokens
        self._stored = stored_tokens(kind, chunk_size)
        self.namespaces = [f"{namespace}.{number}" for number in range(self._stored // tokens)]

    def chunks_needed(self, boundary: int, local: int = 0) -> range:
        """The chunks that are needed to go on at a boundary."""
        first, end = self.kind.first_needed(boundary, local), boundary // self._chunk_size
        return range(first // self._chunk_size if first < boundary else end, end)

    def load(self, load: Load, table: Sequence[int]) -> KeyedSlots | None:
        """What is to be loaded, or None."""
        chunks = self.chunks_needed(load.boundary, load.local)
        first = self.kind.first_needed(load.boundary, load.local)
        starts = [start for start in self._starts(chunks) if start + self._tokens > first]
        if not starts:
            return None
        keyed = self._keyed(load.hashes, starts, table, max(0, first - starts[0]))
        # What the engine has itself may be the blocks of several requests, whose chunks differ behind that.
        keyed.slots[: keyed.first] = NO_SLOT
        return keyed

    def store(self, store: Store, table: Sequence[int]) -> KeyedSlots | None:
        """What is to be stored, or None."""
        starts = self._starts(self.chunks_to_store(store))
        return self._keyed(store.hashes, starts, table, 0) if starts else None

    def chunks_to_store(self, store: Store) -> Sequence[int]:
        """The chunks of which a store keeps this kind, known or not."""
        if not self.namespaces:
            return ()
        size, most = self._chunk_size, min(store.end // self._chunk_size, len(store.hashes))
        if self.kind.form == "full":
            return range((store.start if store.full_from is None else store.full_from) // size, most)
        last = {most * size} if most * size > store.start else set()
        wanted = last if store.boundaries is None else store.boundaries
        chosen = {boundary for boundary in wanted if 0 < boundary <= most * size}
        if self.kind.form == "state":
            chosen &= {store.end}
        return sorted({chunk for boundary in chosen for chunk in self.chunks_needed(boundary)})

    def those_gone(self, chunks: Sequence[int], table: Sequence[int]) -> Sequence[int]:
        """Those of the chunks of which some block is not there any more."""
        size, blocks = self.kind.block_size, self._chunk_size // self.kind.block_size
        if not chunks or (max(chunks) < len(table) // blocks and 0 not in table):
            return ()  # in C: a store waits for it
        here, stored = len(table) // blocks, self._stored // size
        rows = np.asarray(table[: here * blocks], np.int64).reshape(here, blocks)
        there: list[bool] = np.all(rows[:, blocks - stored :] != 0, axis=1).tolist()
        return [chunk for chunk in chunks if chunk >= here or not there[chunk]]

    def _starts(self, chunks: Sequence[int]) -> list[int]:
        """The first token of each piece of these chunks."""
        size, stored, tokens = self._chunk_size, self._stored, self._tokens
        return [
            start
            for chunk in chunks
            for start in range((chunk + 1) * size - stored, (chunk + 1) * size, tokens)
        ]

    def _keyed(
        self, hashes: Sequence[bytes], starts: list[int], table: Sequence[int], first: int
    ) -> KeyedSlots:
        size, head = self._chunk_size, self._chunk_size - self._stored
        keys = [
            ChunkKey(self.namespaces[(start % size - head) // self._tokens], hashes[start // size])
            for start in starts
        ]
        before = starts[0] // size - 1
        parent = ChunkKey(self.namespaces[-1], hashes[before]) if before >= 0 else None
        return KeyedSlots(keys, self._slots(starts, table), first, parent)

    def _slots(self, starts: list[int], table: Sequence[int]) -> Int64s:
        """The slot of each token of the pieces, or of a state its block; NO_SLOT where there is no block."""
        size = self.kind.block_size
        numbers = np.array(starts)[:, None] // size + np.arange(self._tokens // size)
        blocks = np.zeros(int(numbers.max()) + 1, np.int64)
        known = np.asarray(table[: len(blocks)], np.int64)
        blocks[: len(known)] = known
        chosen = blocks[numbers].reshape(-1, 1)
        return _slots_of(chosen, 1 if self.kind.form == "state" else size)


def _slots_of(blocks: npt.NDArray[np.int64], block_size: int) -> Int64s:
    slots: Int64s = np.where(blocks == 0, NO_SLOT, blocks * block_size + np.arange(block_size)).ravel()
    return slots
