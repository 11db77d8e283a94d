"""What one lower tier was asked and how it answered, in numbers."""

from __future__ import annotations

from bisect import bisect_left

from lwkv.telemetry.counters import Counters

BOUNDS_US = (250, 1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000, 4_000_000)
"""Upper bounds of the histogram of a call's time, in microseconds; the last bar has no bound."""


class Meter:
    """Totals of one tier, by name; thread-safe.

    Chunks that loads asked it for: hits, misses. Of gets and puts: calls, bytes of the pages that were OK,
    the time of all calls in microseconds, and how many calls took up to each bound.
    """

    def __init__(self) -> None:
        self._counters = Counters()

    def note_found(self, hits: int, misses: int) -> None:
        self._counters.add("hits", hits)
        self._counters.add("misses", misses)

    def note_call(self, kind: str, seconds: float, num_bytes: int) -> None:
        """`kind` is "get" or "put"."""
        time_us = round(seconds * 1e6)
        place = bisect_left(BOUNDS_US, time_us)
        bar = f"{BOUNDS_US[place]}" if place < len(BOUNDS_US) else "inf"
        self._counters.add(f"{kind}_calls")
        self._counters.add(f"{kind}_bytes", num_bytes)
        self._counters.add(f"{kind}_us", time_us)
        self._counters.add(f"{kind}_us_le_{bar}")

    def totals(self) -> dict[str, int]:
        return self._counters.totals()
