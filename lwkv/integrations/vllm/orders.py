"""What the scheduler's half sends to every worker's half, once a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lwkv.integrations.vllm.blending.orders import BlendOrder, EncodeOrder
from lwkv.keys import HASH_BYTES, ChunkKey
from lwkv.platforms.protocol import Int64s
from lwkv.shared_host.client.promises import Promised
from lwkv.transfer import NO_SLOT

NULL_BLOCK = 0
"""The block that vLLM puts where a request has none, such as behind a sliding window."""


@dataclass(frozen=True, slots=True)
class Move:
    """Tokens of one request that are to be loaded into its blocks, or stored from there.

    Attributes:
        tokens: int64 (tokens,), all from the request's first to the end of the last chunk that is moved.
        salts: what else the keys stand for.
        blocks: int64, the request's block for each `block_size` tokens, as far as it has some.
        first, end: tokens [first, end) are moved.
        keys: for each rank, by number, the namespace and the hashes of all chunks of `tokens`, one behind the
            other; none where they are not known. Whole keys take longer to send than to make.
        promised: for each rank what the owner of host memory holds for it of the chunks from that of `first`
            on, which the rank takes over; None where it is to pin them itself.
    """

    tokens: Int64s
    salts: tuple[str, ...]
    blocks: Int64s
    first: int
    end: int
    keys: Sequence[tuple[str, bytes]] = ()
    promised: Sequence[Promised | None] = ()

    def slots(self, block_size: int) -> Int64s:
        """Each token's slot, int64 (tokens,); NO_SLOT for those that are not moved or have no block."""
        first, end = self.first // block_size, -(-self.end // block_size)
        blocks = self.blocks[first:end, None]
        rows = np.where(blocks == NULL_BLOCK, NO_SLOT, blocks * block_size + np.arange(block_size))
        slots = np.full(len(self.tokens), NO_SLOT, np.int64)
        end = min(self.end, len(self.blocks) * block_size)
        slots[self.first : end] = rows.ravel()[self.first - first * block_size : end - first * block_size]
        return slots


def packed(keys: Sequence[ChunkKey]) -> tuple[str, bytes]:
    """One or more keys of a rank, as they are sent."""
    return keys[0].namespace, b"".join(key.hash for key in keys)


def unpacked(namespace: str, hashes: bytes) -> list[ChunkKey]:
    """What was packed."""
    starts = range(0, len(hashes), HASH_BYTES)
    return [ChunkKey(namespace, hashes[start : start + HASH_BYTES]) for start in starts]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Chunks of a waiting request that lower tiers are to bring to host memory.

    Attributes:
        number: names it in reports, and when it is given back.
        first: the first chunk that is wanted.
        keys: for each rank, all chunks from the prompt's first to the last one wanted, as in Move.
        pins: whether they stay in host memory until they are released.
    """

    number: int
    first: int
    keys: Sequence[tuple[str, bytes]]
    pins: bool = True


@dataclass(frozen=True, slots=True)
class StepOrders:
    """What one step loads before its layers compute, and stores after them.

    Attributes:
        step: counts the scheduler's steps, from 1.
        acknowledged: the last step whose reports the scheduler had when it gave these orders.
        ended: requests that have ended, whose blocks vLLM keeps until this step has stored out of them.
        is_timed: whether all ranks are to report, so that the scheduler learns how long the step took.
        fetches: begin with this step, and go on beside the steps after it.
        stopped: numbers of fetches that bring nothing more, since their request is computed in the step; what
            they have brought is still needed.
        released: numbers of fetches whose chunks are not needed any more.
        blends: prompts that are blended before the step's layers compute, or in this and later steps.
        encodes: segments that are computed alone before that, in blocks that the step's layers fill.
        is_empty: whether no request has tokens in the step, so that what is done in it delays nobody.
        load_within_s: seconds after which the step's loads do not wait for lower tiers any more.
    """

    step: int
    acknowledged: int
    loads: Sequence[Move] = field(default=())
    stores: Sequence[Move] = field(default=())
    ended: Sequence[str] = field(default=())
    fetches: Sequence[Fetch] = field(default=())
    released: Sequence[int] = field(default=())
    is_timed: bool = False
    blends: Sequence[BlendOrder] = field(default=())
    encodes: Sequence[EncodeOrder] = field(default=())
    is_empty: bool = False
    load_within_s: float = float("inf")
    stopped: Sequence[int] = field(default=())

    @property
    def moves_anything(self) -> bool:
        return bool(self.loads or self.stores)
