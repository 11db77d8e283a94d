"""How fast tiers are read and prompts are computed, as measured while vLLM runs."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

DECAY = 0.7
"""What a measurement still counts for when the next one of the same kind has come."""

FIRST_BUCKET = 1024
"""Tokens: positions fall into classes by how often this doubles up to them."""

Floats = npt.NDArray[np.float64]


class Speed:
    """Units a second over the last measurements, of which large ones count for more.

    Attributes:
        measured_at: when the last one came, by the clock; None before the first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._units = self._seconds = 0.0
        self.measured_at: float | None = None

    def add(self, units: float, seconds: float) -> None:
        """Take a measurement over."""
        if units > 0 and seconds > 0:
            self._units = DECAY * self._units + units
            self._seconds = DECAY * self._seconds + seconds
            self.measured_at = self._clock()

    @property
    def seconds_each(self) -> float:
        """Seconds for a unit; 0 before anything was measured."""
        return self._seconds / self._units if self._units else 0.0

    @property
    def per_second(self) -> int:
        """Units a second; 0 before anything was measured."""
        return round(self._units / self._seconds) if self._seconds else 0


class PrefillSpeed:
    """Seconds that it takes to compute a token, by its position: attention takes longer behind more."""

    def __init__(self) -> None:
        self._speeds: dict[int, Speed] = {}

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._speeds)

    def add(self, position: float, num_tokens: int, seconds: float) -> None:
        """Take over how long a step took that computed tokens, on average at this position."""
        self._speeds.setdefault(int(_buckets(np.array([position]))[0]), Speed()).add(num_tokens, seconds)

    def seconds_at(self, positions: Floats) -> Floats:
        """For each position the seconds of a token there, or of the nearest that was measured."""
        buckets = _buckets(positions)
        known = np.array(sorted(self._speeds))
        nearest = known[np.abs(buckets[:, None] - known[None, :]).argmin(axis=1)]
        return np.array([self._speeds[int(bucket)].seconds_each for bucket in nearest])

    def per_second(self) -> int:
        """Tokens a second at the first positions that were measured; 0 before that."""
        return self._speeds[min(self._speeds)].per_second if self._speeds else 0


def _buckets(positions: Floats) -> npt.NDArray[np.int64]:
    return np.floor(np.log2(1 + np.maximum(positions, 0) / FIRST_BUCKET)).astype(np.int64)
