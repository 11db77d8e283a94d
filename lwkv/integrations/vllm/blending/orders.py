"""What the scheduler's half has a worker blend and encode."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lwkv.blend.request import Segment
from lwkv.platforms.protocol import Int64s


@dataclass(frozen=True, slots=True)
class BlendOrder:
    """One prompt whose first `end` tokens are to be in its blocks before the step's forward pass, or later.

    Attributes:
        tokens: int64 (tokens,), to the end of the last segment that is loaded, or of the question: both may
            be behind `end`.
        salts: what else the keys stand for.
        slots: int64 (end,), of the first `end` tokens.
        num_local: leading tokens whose KV is in place.
        num_exact: leading tokens that are in place or cached as an ordinary prefill has stored them.
        segments: those of which at least one chunk is cached, ascending; what is in none of them is computed.
        question_slots: int64 (n,), of the tokens from `end` to the prompt's end. The step's forward pass
            computes them, and overwrites what is there before; of a request that waits, the blend computes
            them. Empty where nobody asks, or the step does not have all of them.
        waiting: the request, where it is not in the step, and waits until the worker says that its blend has
            ended: steps of others do a part of it each. None where it is in the step.
    """

    tokens: Int64s
    salts: tuple[str, ...]
    slots: Int64s
    num_local: int
    num_exact: int
    segments: tuple[Segment, ...]
    question_slots: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    waiting: str | None = None

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
