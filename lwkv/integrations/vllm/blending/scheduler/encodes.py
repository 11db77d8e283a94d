"""Which segments are computed alone and stored, and in which step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lwkv.integrations.vllm.blending.orders import EncodeOrder
from lwkv.integrations.vllm.blending.scheduler.prompt_chunks import KeyedSegment, PromptChunks
from lwkv.platforms.protocol import Int64s

TRY_AGAIN_S = 30.0
"""Seconds after which a segment is encoded again that was encoded and is still not cached."""


class Encodes:
    """Orders each segment that is not cached to be encoded once.

    Args:
        prefix_length: tokens that segments are computed behind.
        most_rows: that a step encodes.
        is_cached: whether all of a segment is in some tier.
        clock: seconds.
    """

    def __init__(
        self,
        prefix_length: int,
        most_rows: int,
        is_cached: Callable[[KeyedSegment, PromptChunks], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefix_length, self._most_rows = prefix_length, most_rows
        self._is_cached, self._clock = is_cached, clock
        self._rows = 0
        self._encoded_at: dict[bytes, float] = {}

    def begin_step(self) -> None:
        """Go on to a step that encodes as much as the one before."""
        self._rows = 0

    def reset(self) -> None:
        """Forget what was encoded."""
        self._encoded_at.clear()

    def orders(
        self, request: Any, chunks: PromptChunks, salts: tuple[str, ...], slots: Int64s
    ) -> list[EncodeOrder]:
        """Orders for a request's segments that are not cached.

        Args:
            slots: that nobody has read or read from, int64 (slots,).
        """
        orders = []
        for segment in chunks.segments:
            part = segment.part
            num_rows = self._prefix_length + part.end - part.start
            if num_rows > min(len(slots), self._most_rows - self._rows):
                continue
            if not self._has_to_be_encoded(segment, chunks):
                continue
            self._rows += num_rows
            tokens = np.array(request.prompt_token_ids[part.start : part.end], np.int64)
            orders.append(EncodeOrder(tokens, salts, slots[:num_rows]))
        return orders

    def _has_to_be_encoded(self, segment: KeyedSegment, chunks: PromptChunks) -> bool:
        """Whether a chunk is not cached, and was not just encoded; it is from here on."""
        if self._is_cached(segment, chunks):
            self._encoded_at.pop(segment.name, None)  # if it is evicted, it is worth another time
            return False
        now = self._clock()
        if now - self._encoded_at.get(segment.name, -TRY_AGAIN_S) < TRY_AGAIN_S:
            return False
        self._encoded_at = {name: at for name, at in self._encoded_at.items() if now - at < TRY_AGAIN_S}
        self._encoded_at[segment.name] = now
        return True


def slots_of(blocks: Sequence[int], block_size: int) -> Int64s:
    """The slots of blocks, one after the other, int64 (blocks * block_size,)."""
    starts = np.array(blocks, np.int64)[:, None] * block_size
    slots: Int64s = (starts + np.arange(block_size)).reshape(-1)
    return slots
