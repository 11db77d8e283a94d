"""Up to where a prompt is blended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lwkv.blend.request import Segment


@dataclass(frozen=True, slots=True)
class BlendSizes:
    """What bounds a blend.

    Attributes:
        block_size, chunk_size: tokens.
        min_tokens: of a prompt that is blended.
        most_rows: rows that a step may compute for blends, in every layer: `max_num_batched_tokens`.
        full_layers: the part of the model's layers in which all rows are computed.
        share: of the reused tokens, the part that is computed in the others.
        asks: whether the selector needs the tokens behind the blend, too.
        in_parts: whether blends beside running requests are done in parts.
    """

    block_size: int
    chunk_size: int
    min_tokens: int
    most_rows: int
    full_layers: float
    share: float
    asks: bool = False
    in_parts: bool = False

    def rows(self, reused: int, always: int) -> float:
        """Rows that a blend computes, as so many in every layer."""
        return always + reused * (self.full_layers + (1 - self.full_layers) * self.share)


@dataclass(frozen=True, slots=True)
class BlendPlan:
    """Tokens [num_local, end) that a step brings to a request's blocks, of which [num_local, num_exact) are
    loaded as an ordinary prefill has stored them.

    Attributes:
        waits: whether the request waits while steps of others do a part of it each.
        question: tokens behind `end` that it computes, too.
    """

    num_local: int
    num_exact: int
    end: int
    segments: tuple[Segment, ...]
    waits: bool = False
    question: int = 0

    @property
    def claimed(self) -> int:
        """Tokens that are in place when it has ended, less those that were before."""
        return self.end + self.question - self.num_local


def make_plan(
    sizes: BlendSizes,
    num_tokens: int,
    cached: Sequence[tuple[Segment, int]],
    num_local: int,
    num_exact: int,
) -> BlendPlan | None:
    """Plan the blend of a prompt; None where there is nothing to gain, or too much to compute.

    Args:
        num_tokens: of the request.
        cached: its segments, ascending, each with how many of its leading tokens are cached.
        num_local, num_exact: as in BlendPlan.
    """
    found: list[Segment] = []
    best, reused = None, 0
    for part, count in cached:
        first, last = max(part.start, num_exact), part.start + count
        # Up to the last block that it fills; the request's last token is computed by vLLM.
        end = min(last, num_tokens - 1)
        end -= end % sizes.block_size
        if end <= first:
            continue
        found.append(part)
        mine = reused + end - first
        if sizes.rows(mine, end - num_exact - mine) > sizes.most_rows:
            break
        reused += last - first
        best = BlendPlan(num_local, num_exact, end, tuple(found))
    return best


def beside_others(sizes: BlendSizes, plan: BlendPlan, num_tokens: int) -> BlendPlan:
    """The same for a request of `num_tokens` that waits while its blend is done in parts.

    Its question, which a selector may need, comes along: vLLM has given blocks to no tokens behind the blend.
    """
    question = num_tokens - plan.end if sizes.asks and plan.segments[-1].end < num_tokens else 0
    reused = sum(min(part.end, plan.end) - max(part.start, plan.num_exact) for part in plan.segments)
    rows = sizes.rows(reused, plan.end + question - plan.num_exact - reused)
    return replace(plan, waits=True, question=question if rows <= sizes.most_rows else 0)
