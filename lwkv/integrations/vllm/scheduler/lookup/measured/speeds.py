"""How fast tiers are read, as measured while vLLM runs."""

from __future__ import annotations

import time
from collections.abc import Callable

DECAY = 0.7
"""What a measurement still counts for when the next whole one of the same kind has come."""

HALF_LIFE_S = 3.0
"""Seconds after which a measurement counts for half, when the next one comes."""


MEASURE_AGAIN_S = 30.0
"""Seconds after which what was too slow is measured again."""


class Speed:
    """Units a second over the last measurements, of which large ones count for more.

    Args:
        whole: units from which on a measurement is a whole one; a smaller one makes the others count for less
            only by its share.

    Attributes:
        measured_at: when the last one came, by the clock; None before the first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, whole: float = 0.0) -> None:
        self._clock = clock
        self._whole = whole
        self._units = self._seconds = 0.0
        self.measured_at: float | None = None

    def add(self, units: float, seconds: float) -> None:
        """Take a measurement over."""
        if units > 0 and seconds > 0:
            decay = self._decay(units)
            self._units = decay * self._units + units
            self._seconds = decay * self._seconds + seconds
            self.measured_at = self._clock()

    @property
    def seconds_each(self) -> float:
        """Seconds for a unit; 0 before anything was measured."""
        return self._seconds / self._units if self._units else 0.0

    @property
    def per_second(self) -> int:
        """Units a second; 0 before anything was measured."""
        return round(self._units / self._seconds) if self._seconds else 0

    def _decay(self, units: float) -> float:
        age = 0.0 if self.measured_at is None else self._clock() - self.measured_at
        share = 1.0 if units >= self._whole else units / self._whole
        return float(DECAY**share * 0.5 ** (age / HALF_LIFE_S))


def is_old(speed: Speed, now: float) -> bool:
    """Whether something was not measured of late."""
    return speed.measured_at is None or now - speed.measured_at >= MEASURE_AGAIN_S
