"""How long a pass computed and how long it waited for its loads, measured without blocking."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from lwkv.platforms import Platform


class PaceFound(NamedTuple):
    """Seconds of one pass: computing; waiting for loads, and for the first of them alone."""

    computed: float
    waited: float
    waited_first: float


class Pace:
    """Takes the time of one pass on the stream that is current, in device time where the platform has that.

    `arrive` and `go_on` stand around each wait for a layer; `end` behind the last layer.
    """

    def __init__(self, platform: Platform, device: torch.device) -> None:
        self._platform, self._device = platform, device
        self._timed = platform.features.event_timing
        self._marks: list[Any] = []

    def arrive(self) -> None:
        """The pass is about to wait for a layer."""
        self._mark()

    def go_on(self) -> None:
        """It has waited, and computes on."""
        self._mark()

    def end(self) -> None:
        """It has computed everything."""
        self._mark()

    def found(self) -> PaceFound | None:
        """What was found; None before the device has got to the end, or where any of it was not timed."""
        if len(self._marks) < 3 or (self._timed and not self._platform.query(self._marks[-1])):
            return None
        found = [self._seconds(a, b) for a, b in pairwise(self._marks)]
        steps = [step for step in found if step is not None]
        if len(steps) < len(found):
            return None
        return PaceFound(sum(steps[1::2]), sum(steps[::2]), steps[0])

    def _mark(self) -> None:
        if not self._timed:
            self._marks.append(time.perf_counter())
            return
        event = self._platform.new_event(timing=True)
        self._platform.record(event, self._platform.current_stream(self._device))
        self._marks.append(event)

    def _seconds(self, start: Any, end: Any) -> float | None:
        if not self._timed:
            return float(end - start)
        elapsed = self._platform.elapsed_ms(start, end)
        return None if elapsed is None else elapsed / 1e3
