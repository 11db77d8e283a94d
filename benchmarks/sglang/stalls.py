"""Where on the device a model waits for the layers of a load, and how long it computes one."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

import torch

from lwkv.platforms import Event, Platform

STALLS_SUFFIX = ".stalls"
EVERY = 3
"""Loads of which one is looked at: what it takes to record events is part of its time to first token."""


@dataclass(slots=True)
class _Marks:
    """Events of one load, two for each layer: before the model's stream waits for it, and behind that."""

    index: int
    before: list[Event] = field(default_factory=list)
    behind: list[Event] = field(default_factory=list)


class Stalls:
    """Marks the places in the model's work where it waits, for some of the loads.

    For the scheduler's thread. Off where the platform's events have no times.
    """

    def __init__(self, platform: Platform, device: torch.device) -> None:
        self._platform, self._device = platform, device
        self._is_on = platform.features.event_timing
        self._marks: _Marks | None = None

    def begin(self, index: int) -> None:
        """Take note that load `index` has been started; negative for none."""
        if self._is_on and self._marks is None and index >= 0 and index % EVERY == 0:
            self._marks = _Marks(index)

    def before(self, index: int, layer: int) -> bool:
        """Mark the place before the model waits for `layer` of load `index`; False where none is marked."""
        marks = self._marks
        if marks is None or marks.index != index or len(marks.before) != layer:
            return False
        marks.before.append(self._record())
        return True

    def behind(self) -> None:
        """Mark the place behind the wait that `before` has just marked."""
        if self._marks is not None:
            self._marks.behind.append(self._record())

    def is_over(self) -> bool:
        """Whether the device is past all marks."""
        marks = self._marks
        return marks is None or not marks.behind or self._platform.query(marks.behind[-1])

    def take(self, index: int) -> dict[str, float]:
        """Milliseconds on the device of load `index`, whose model has ended; empty if it was not marked."""
        marks, self._marks = self._marks, None
        if marks is None or marks.index != index or len(marks.behind) < 2:
            return {}
        self._platform.synchronize_event(marks.behind[-1])
        between = self._platform.elapsed_ms
        waits = [between(*pair) or 0.0 for pair in zip(marks.before, marks.behind, strict=True)]
        computed = [between(a, b) or 0.0 for a, b in zip(marks.behind, marks.before[1:], strict=False)]
        return {"first wait": waits[0], "other waits": sum(waits[1:]), "a layer": median(computed)}

    def _record(self) -> Event:
        event = self._platform.new_event(timing=True)
        self._platform.record(event, self._platform.current_stream(self._device))
        return event


def stall_table(mode: str, stalls: list[dict[str, float]]) -> str:
    """Medians in milliseconds; empty where nothing was marked."""
    if not stalls:
        return ""
    times = [f"{name} {median(found[name] for found in stalls):.2f}" for name in stalls[0]]
    return f"{mode}, the model's stream on the device: {', '.join(times)}"
