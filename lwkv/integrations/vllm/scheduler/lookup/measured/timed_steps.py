"""Which steps say how fast prompts are computed and loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LEAST_TOKENS = 256
"""Steps that compute, and loads that bring, fewer tokens say too little of a speed."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step that is under way: when it was ordered, what it computes, and tokens loaded from host memory."""

    begun: float
    num_tokens: int
    position: float
    num_loaded: int


def tokens_and_position(output: Any) -> tuple[int, float]:
    """How many tokens a step of vLLM's scheduler output prefills, and the mean position of its tokens.

    One token of each request is left out: a step that only decodes prefills none, and its time says nothing
    of prefills. The position is 0 where there are fewer than LEAST_TOKENS.
    """
    scheduled = output.num_scheduled_tokens
    total = sum(scheduled.values())
    if total - len(scheduled) < LEAST_TOKENS:
        return total - len(scheduled), 0.0
    cached = output.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    weighted = (number * (starts[name] + number / 2) for name, number in scheduled.items())
    return total - len(scheduled), sum(weighted) / total
