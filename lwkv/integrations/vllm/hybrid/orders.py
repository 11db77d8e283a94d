"""What the scheduler's half sends to every worker's half, once a step, for models with several groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lwkv.integrations.vllm.orders import Fetch
from lwkv.keys import HASH_BYTES


@dataclass(frozen=True, slots=True)
class Hashes:
    """The hashes of a prompt's chunks from the first on, one behind the other, as they are sent."""

    joined: bytes

    @classmethod
    def of(cls, hashes: Sequence[bytes]) -> Hashes:
        return cls(b"".join(hashes))

    def apart(self) -> list[bytes]:
        """Each by itself."""
        starts = range(0, len(self.joined), HASH_BYTES)
        return [self.joined[start : start + HASH_BYTES] for start in starts]


@dataclass(frozen=True, slots=True)
class PinOrder:
    """Chunks of a waiting request that are to stay in host memory until they are released.

    Attributes:
        number: names it in reports, and when it is released.
        local, boundary: tokens that vLLM has itself, and those with which the request is to go on.
    """

    number: int
    hashes: Hashes
    local: int
    boundary: int


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Tokens [local, boundary) of a request are to be in its blocks, as far as each kind needs them.

    Attributes:
        tables: for each of vLLM's groups, the request's block for each of its block sizes of tokens.
        request_id: vLLM's.
    """

    hashes: Hashes
    local: int
    boundary: int
    tables: Sequence[Sequence[int]]
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """Chunks that end in (start, end] are whole after the step; `boundaries` are where a prompt may go on."""

    hashes: Hashes
    start: int
    end: int
    boundaries: frozenset[int]
    tables: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class HybridOrders:
    """What one step loads, stores, pins and releases.

    Attributes:
        step: counts the scheduler's steps, from 1.
        loads: for requests that compute in this step.
        loads_apart: for requests that compute in none until they are loaded.
        fetches: chunks of one kind each, which lower tiers are to bring to host memory beside this step and
            those after it.
        stopped: numbers of fetches that bring nothing more; what they have brought is still needed.
        given_back: numbers of fetches whose chunks are not needed any more.
        is_timed: whether all ranks are to report, so that the scheduler learns how long the step took.
    """

    step: int
    loads: Sequence[LoadOrder] = field(default=())
    loads_apart: Sequence[LoadOrder] = field(default=(), kw_only=True)
    stores: Sequence[StoreOrder] = field(default=())
    pins: Sequence[PinOrder] = field(default=())
    released: Sequence[int] = field(default=())
    fetches: Sequence[Fetch] = field(default=(), kw_only=True)
    stopped: Sequence[int] = field(default=(), kw_only=True)
    given_back: Sequence[int] = field(default=(), kw_only=True)
    is_timed: bool = field(default=False, kw_only=True)

    @property
    def moves_anything(self) -> bool:
        return bool(self.loads or self.stores)
