"""Which tokens of which chunks a batch moves, and where each row of them lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lwkv.errors import RequestError
from lwkv.keys import ChunkKey
from lwkv.platforms.protocol import Int64s

NO_SLOT = -1


def lacks_slot(slots: Int64s) -> bool:
    """Whether any of `slots`, int64 (tokens,) and none below NO_SLOT, is NO_SLOT."""
    # In a third of the time that it takes to compare each and look for one that is True.
    return int(slots.min(initial=0)) == NO_SLOT


class PageShape(NamedTuple):
    """How a full page is cut: `parts` (K and V: 2, else 1) of `rows` rows of `tokens_per_row` tokens."""

    parts: int
    rows: int
    tokens_per_row: int


def joined(parts: Sequence[Int64s]) -> Int64s:
    """One array after the other, int64; the very same where there is only one."""
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])


@dataclass(frozen=True, slots=True)
class Transfer:
    """Chunks of one or more requests, moved together in every layer.

    Attributes:
        chunk_tokens: int64 (chunks,), tokens in each chunk.
        slots: int64 (tokens,), each token's slot, chunk after chunk; NO_SLOT for a token that is not moved.
        device_slots: int64 (tokens,) on the device, where only that knows the slots: every token is moved
            then, and `slots` are zeros.
        every_token: whether every token is known to be moved; else the slots are looked at.
    """

    chunk_tokens: Int64s
    slots: Int64s
    device_slots: torch.Tensor | None = None
    every_token: bool = False

    @classmethod
    def join(cls, transfers: Sequence[Transfer]) -> Transfer:
        """One transfer that moves the chunks of several, in their order."""
        counts = joined([transfer.chunk_tokens for transfer in transfers])
        on_device = [t.device_slots for t in transfers if t.device_slots is not None]
        # A single one as it is: no work for the device.
        device_slots = on_device[0] if len(on_device) == 1 else torch.cat(on_device) if on_device else None
        slots = joined([transfer.slots for transfer in transfers])
        return cls(counts, slots, device_slots, all(transfer.every_token for transfer in transfers))

    @property
    def num_chunks(self) -> int:
        return len(self.chunk_tokens)

    def is_whole(self, chunk_size: int) -> bool:
        """Whether every chunk is full and every token of it moved."""
        if not (self.chunk_tokens == chunk_size).all():
            return False
        return self.every_token or self.device_slots is not None or not lacks_slot(self.slots)

    def only(self, chunks: npt.NDArray[np.bool_]) -> Transfer:
        """The same without the chunks that are False, bool (chunks,)."""
        moved = np.repeat(chunks, self.chunk_tokens)
        on_device = self._device_slots_of(moved)
        return Transfer(self.chunk_tokens[chunks], self.slots[moved], on_device, self.every_token)

    def _device_slots_of(self, moved: npt.NDArray[np.bool_]) -> torch.Tensor | None:
        """Those of the tokens that are True: run by run, as an index would have to be sent to the device."""
        if self.device_slots is None:
            return None
        edges = np.diff(moved, prepend=False, append=False).nonzero()[0].tolist()
        runs = [self.device_slots[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
        return runs[0] if len(runs) == 1 else torch.cat([self.device_slots[:0], *runs])

    def rows(self, shape: PageShape, chunks_per_slice: int) -> tuple[Int64s, list[int]]:
        """Number every row that is moved.

        Returns:
            int64 (3, rows): slot (block id for rows of whole blocks), K row and V row in the staging buffer,
            which every slice of `chunks_per_slice` chunks fills anew; each slice's first row, and the end.
        """
        counts = self.chunk_tokens // shape.tokens_per_row
        slots = self.row_slots(shape.tokens_per_row)
        first = np.arange(len(counts)) % chunks_per_slice * (shape.parts * shape.rows)
        ends = np.append(0, np.cumsum(counts))
        bounds = ends[[*range(0, len(counts), chunks_per_slice), -1]]
        k_rows = np.arange(len(slots)) + np.repeat(first - ends[:-1], counts)
        v_rows = np.repeat(counts, counts) + k_rows
        moved = slots != NO_SLOT
        if not moved.all():
            slots, k_rows, v_rows = slots[moved], k_rows[moved], v_rows[moved]
            bounds = np.append(0, np.cumsum(moved))[bounds]
        return np.stack([slots, k_rows, v_rows]), bounds.tolist()

    def row_slots(self, tokens_per_row: int) -> Int64s:
        """The slot of each row, or its block where a row is a whole block; NO_SLOT for one that is not moved.

        Raises RequestError where tokens that can only be moved together do not fill one block in order.
        """
        if tokens_per_row == 1:
            return self.slots
        blocks = self.slots.reshape(-1, tokens_per_row)
        skipped = (blocks == NO_SLOT).all(axis=1)
        in_order = (np.diff(blocks, axis=1) == 1).all(axis=1) & (blocks[:, 0] % tokens_per_row == 0)
        wrong = ~(skipped | in_order)
        if wrong.any():
            raise RequestError(
                f"this cache moves whole blocks of {tokens_per_row} tokens, but a block's slots are "
                f"{blocks[wrong][0].tolist()}: give all of them in order, or {NO_SLOT} for all"
            )
        return np.where(skipped, NO_SLOT, blocks[:, 0] // tokens_per_row)


class Chunking(NamedTuple):
    """How tokens are cut into chunks.

    `chunk_size` tokens each; a smaller last one counts if `partial`, cut down to a multiple of `unit` tokens,
    which `chunk_size` is too.
    """

    chunk_size: int
    partial: bool
    unit: int = 1

    def chunk_tokens(self, num_tokens: int) -> Int64s:
        """Tokens of each chunk, int64 (chunks,)."""
        full, rest = divmod(self.covered(num_tokens), self.chunk_size)
        return np.array([self.chunk_size] * full + [rest] * (rest > 0), np.int64)

    def covered(self, num_tokens: int) -> int:
        """Tokens of all chunks together."""
        rest = num_tokens % self.chunk_size
        return num_tokens - (rest % self.unit if self.partial else rest)


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that fits the engine's cache.

    Attributes:
        ids, slots: int64 (tokens,).
        first: tokens at the beginning that the engine has itself.
        chunk_tokens: int64 (chunks,), tokens of each chunk.
        keys: of every chunk, where the caller made them; `ids` then mean nothing.
        device_slots: as in Transfer.
        parent: the chunk before the first of `keys`, if it is known.
        every_token: whether every token is known to have a slot; else that is looked at.
    """

    ids: Int64s
    slots: Int64s
    first: int
    salts: tuple[str, ...]
    chunk_size: int
    chunk_tokens: Int64s
    keys: list[ChunkKey] | None = None
    device_slots: torch.Tensor | None = None
    parent: ChunkKey | None = None
    every_token: bool = False

    def loads(self, first_chunk: int, last_chunk: int) -> Transfer:
        """Move chunks [first_chunk, last_chunk), less the tokens that the engine has itself."""
        counts = self.chunk_tokens[first_chunk:last_chunk]
        start = first_chunk * self.chunk_size
        slots = self.slots[start : start + int(counts.sum())].copy()
        slots[: max(0, self.first - start)] = NO_SLOT
        return Transfer(counts, slots, self._on_device(start, len(slots)))

    def saves(self) -> Transfer:
        """Move every chunk."""
        num_tokens = int(self.chunk_tokens.sum())
        on_device = self._on_device(0, num_tokens)
        return Transfer(self.chunk_tokens, self.slots[:num_tokens], on_device, self.every_token)

    def new_chunks(self) -> npt.NDArray[np.bool_]:
        """Chunks that can be stored: not wholly in the masked part, and with a slot for every token."""
        if self.every_token and not self.first:
            return np.ones(len(self.chunk_tokens), bool)
        ends = np.cumsum(self.chunk_tokens)
        computed: npt.NDArray[np.bool_] = ends > self.first
        if not self.every_token and lacks_slot(self.slots):
            without = np.cumsum(np.append(0, self.slots == NO_SLOT))
            computed &= without[ends] == without[ends - self.chunk_tokens]
        return computed

    def _on_device(self, start: int, num_tokens: int) -> torch.Tensor | None:
        return None if self.device_slots is None else self.device_slots[start : start + num_tokens]
