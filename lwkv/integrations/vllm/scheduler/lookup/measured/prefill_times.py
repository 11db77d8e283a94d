"""How long prompts take to be computed, as measured while vLLM runs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

KEPT = 5
"""Steps of about the same size and position that are remembered."""

SMALL, FAR = 512, 65536
"""Tokens of a step, and a position: there attention may take as long as all else.

As long as only smaller steps were measured, most of their time is taken for what any step takes. That tokens
are thought cheap is noticed when they are computed."""

TOWARDS_NONE = 1e-4
"""How much the parts of the time are drawn to 0, which only decides what the measurements leave open."""


class Step(NamedTuple):
    """A step that has computed tokens at this position on average."""

    position: float
    num_tokens: int
    seconds: float

    @property
    def parts(self) -> list[float]:
        """How much it has of each part that takes time: see PrefillTimes."""
        return [1.0, self.num_tokens / SMALL, self.num_tokens * self.position / (SMALL * FAR)]


class PrefillTimes:
    """A step takes some time in any case, some for each token, and some more behind many others: attention.

    What loading saves is only the latter two: the rest of the prompt needs a step either way. Steps are
    sorted by size and position; of each kind the median of the last ones counts, since the first ones of an
    engine are slow, and some are held up by others.
    """

    def __init__(self) -> None:
        self._steps: defaultdict[tuple[int, int], deque[Step]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._fit: Floats | None = None

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._steps)

    def add(self, position: float, num_tokens: int, seconds: float) -> None:
        """Take over how long a step took that computed tokens, on average at this position."""
        if seconds > 0:
            kind = int(np.log2(num_tokens)), int(np.log2(1 + position / SMALL))
            self._steps[kind].append(Step(position, num_tokens, seconds))
            self._fit = None

    def step_s(self) -> float:
        """Seconds of a step however few tokens it computes; 0 before anything was measured."""
        return float(self._times()[0])

    def tokens_s(self, tokens: Floats, positions: Floats) -> Floats:
        """Seconds more for so many tokens, on average at these positions."""
        _, for_each, behind_others = self._times()
        seconds: Floats = tokens / SMALL * (for_each + positions / FAR * behind_others)
        return seconds

    def per_second(self) -> int:
        """Tokens a second at the first positions; 0 before that is known."""
        seconds = float(self.tokens_s(np.array([SMALL]), np.array([SMALL / 2]))[0])
        return round(SMALL / seconds) if seconds else 0

    def _times(self) -> Floats:
        if self._fit is None:
            counts = [steps for steps in self._steps.values() if len(steps) > 1] or self._steps.values()
            self._fit = _fitted([_median(steps) for steps in counts])
        return self._fit


def _median(steps: Sequence[Step] | deque[Step]) -> Step:
    return sorted(steps, key=lambda step: step.seconds / step.num_tokens)[(len(steps) - 1) // 2]


def _fitted(steps: Sequence[Step]) -> Floats:
    """Seconds of each part, none below 0, so that the relative errors are the least."""
    best, least = np.zeros(3), np.inf
    if not steps:
        return best
    seconds = np.array([step.seconds for step in steps])
    scale = seconds.mean()
    shares = np.array([step.parts for step in steps]) * (scale / seconds)[:, None]
    for kept in product((False, True), repeat=3):
        found = _least_squares(shares, np.array(kept))
        error = ((shares @ found - 1) ** 2).sum() + TOWARDS_NONE * (found**2).sum()
        if (found >= 0).all() and error < least:
            best, least = found * scale, error
    return best


def _least_squares(shares: Floats, kept: npt.NDArray[np.bool_]) -> Floats:
    """The parts that are `kept` such that shares times parts is 1 for every step; the others are 0."""
    found = np.zeros(3)
    drawn = np.sqrt(TOWARDS_NONE) * np.eye(3)
    rows = np.concatenate([shares, drawn])[:, kept]
    wanted = np.concatenate([np.ones(len(shares)), np.zeros(3)])
    found[kept] = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    return found
