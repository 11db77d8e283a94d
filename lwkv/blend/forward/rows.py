"""Which rows of a batch of prompts are being computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lwkv.blend.request import CheckedBlend
from lwkv.platforms.protocol import Int64s


@dataclass(frozen=True, slots=True)
class PromptReuse:
    """What is known of one prompt's tokens before it is computed.

    Attributes:
        known: leading tokens whose KV is an ordinary prefill's: nothing of them is computed.
        reused: bool (tokens,), tokens whose KV comes from a segment: candidates to be computed again.
        segment_starts: of the segments that have reused tokens.
    """

    prompt: CheckedBlend
    known: int
    reused: npt.NDArray[np.bool_]
    segment_starts: tuple[int, ...] = ()

    @property
    def candidates(self) -> Int64s:
        """The positions of the reused tokens, int64 (candidates,), ascending."""
        return np.flatnonzero(self.reused)

    @property
    def always(self) -> Int64s:
        """The positions that are computed in any case: gaps and the question, int64 (n,), ascending."""
        return self.with_always(np.zeros(0, np.int64))

    def with_always(self, chosen: Int64s) -> Int64s:
        """Those, and reused ones at positions `chosen`: int64 (n,), ascending."""
        mine = ~self.reused
        mine[: self.known] = False
        mine[chosen] = True
        return np.flatnonzero(mine)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The reused tokens as positions [first, last) of as few runs as can be."""
        ends = np.flatnonzero(np.diff(self.reused, prepend=False, append=False))
        return [(int(first), int(last)) for first, last in ends.reshape(-1, 2)]

    @property
    def question(self) -> int:
        """How many tokens there are behind the last reused one."""
        reused = self.candidates
        return len(self.prompt) - (int(reused[-1]) + 1 if len(reused) else self.known)


@dataclass(frozen=True, slots=True)
class ComputedRows:
    """Rows of a batch that are computed together, prompt after prompt, ascending in each.

    Attributes:
        tokens, positions, slots: int64 (rows,), on the device.
        always: bool (rows,), on the device: False for rows that may be left out from some layer on.
        bounds: the first row of each prompt, and the end.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    always: Tensor
    bounds: tuple[int, ...]

    @classmethod
    def of(
        cls, reuses: Sequence[PromptReuse], chosen: Sequence[Int64s], send: Callable[[Int64s], Tensor]
    ) -> ComputedRows:
        """The rows that are always computed, and of each prompt the reused ones at positions `chosen`.

        Args:
            send: brings a table to the device.
        """
        picked = [reuse.with_always(extra) for reuse, extra in zip(reuses, chosen, strict=True)]
        pairs = list(zip(reuses, picked, strict=True))
        numbers = np.concatenate(
            [
                np.stack([reuse.prompt.ids[at], at, reuse.prompt.slots[at], ~reuse.reused[at]])
                for reuse, at in pairs
            ],
            axis=1,
        )
        tokens, positions, slots, always = send(numbers).unbind()
        bounds = np.append(0, np.cumsum([len(at) for at in picked])).tolist()
        return cls(tokens, positions, slots, always.bool(), tuple(bounds))

    def __len__(self) -> int:
        return self.bounds[-1]

    def marked(self, reuses: Sequence[PromptReuse]) -> ComputedRows:
        """The same, which are all rows of all prompts, with the reused ones not `always` computed."""
        always = torch.ones_like(self.always)
        for reuse, start in zip(reuses, self.bounds, strict=False):
            for first, last in reuse.runs:
                always[start + first : start + last] = False
        return replace(self, always=always)

    @property
    def parts(self) -> list[slice]:
        """Each prompt's rows."""
        return [slice(a, b) for a, b in zip(self.bounds, self.bounds[1:], strict=False)]

    @property
    def last(self) -> list[int]:
        """Each prompt's last row."""
        return [end - 1 for end in self.bounds[1:]]

    def only(self, kept: Sequence[Tensor]) -> tuple[ComputedRows, Tensor]:
        """The rows numbered `kept` of each prompt, int64, ascending in it; and their numbers among all."""
        numbers = torch.cat([rows + start for rows, start in zip(kept, self.bounds, strict=False)])
        bounds = np.append(0, np.cumsum([len(rows) for rows in kept])).tolist()
        return ComputedRows(
            self.tokens[numbers],
            self.positions[numbers],
            self.slots[numbers],
            self.always[numbers],
            tuple(bounds),
        ), numbers
