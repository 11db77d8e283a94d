"""What the scheduler's half has a worker blend and encode in one step."""

from __future__ import annotations

from dataclasses import dataclass

from lwkv.blend.request import Segment
from lwkv.platforms.protocol import Int64s


@dataclass(frozen=True, slots=True)
class BlendOrder:
    """One prompt whose first `end` tokens are to be in its blocks before the step's forward pass.

    Attributes:
        tokens: int64 (tokens,), to the end of the last segment that is loaded, which may be behind `end`.
        salts: what else the keys stand for.
        slots: int64 (end,), of the first `end` tokens.
        num_local: leading tokens whose KV is in place.
        num_exact: leading tokens that are in place or cached as an ordinary prefill has stored them.
        segments: those of which at least one chunk is cached, ascending; what is in none of them is computed.
    """

    tokens: Int64s
    salts: tuple[str, ...]
    slots: Int64s
    num_local: int
    num_exact: int
    segments: tuple[Segment, ...]

    @property
    def end(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class EncodeOrder:
    """One segment to be computed behind the shared prefix and stored, in blocks that nobody reads yet.

    Attributes:
        tokens: int64 (tokens,), of the segment alone.
        salts: what else its keys stand for.
        slots: int64 (shared prefix + tokens,); what is in them is overwritten by the step's forward pass.
    """

    tokens: Int64s
    salts: tuple[str, ...]
    slots: Int64s
