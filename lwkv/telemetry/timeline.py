"""When each layer was computed, loaded and saved: recorded cheaply, and added up."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from lwkv.platforms import Platform, Stream

Lane: TypeAlias = Literal["load", "compute", "save"]
LANES: tuple[Lane, ...] = ("load", "compute", "save")

# A wait orders two device times only to within the rounding of the driver's clock.
_ROUNDING_S = 1e-6


@dataclass(frozen=True, slots=True)
class Span:
    """The time of one layer in one lane, in seconds from the timeline's origin."""

    lane: Lane
    layer: int
    start: float
    end: float


class Recording:
    """A span under way, ended by `end()` or by leaving its `with` block; ending it again does nothing."""

    __slots__ = ("_lane", "_layer", "_start", "_stream", "_timeline")

    def __init__(self, timeline: Timeline | None, lane: Lane, layer: int, stream: Stream | None) -> None:
        self._timeline, self._lane, self._layer, self._stream = timeline, lane, layer, stream
        self._start = timeline._mark(stream) if timeline else None

    def end(self, stream: Stream | None = None) -> None:
        """End the span behind all that `stream` holds now: by default, the stream it began on."""
        if self._timeline:
            self._timeline._keep(self._lane, self._layer, self._start, stream or self._stream)
            self._timeline = None

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


_OFF = Recording(None, "compute", -1, None)


class Timeline:
    """Records spans from any thread, without blocking the host; they are resolved when asked for.

    A span on a stream has device time, from two events; one without a stream has the host's clock, as have
    all where `features.event_timing` is False: there a span shows when its work was queued. Both clocks start
    at the same origin. Device time loses digits away from it (8 µs after 100 s): `restart()` now and then.
    """

    def __init__(
        self, platform: Platform, device: torch.device, on: bool = True, max_spans: int = 100_000
    ) -> None:
        """Start recording unless `on` is False; past `max_spans` spans nothing is kept until `restart()`."""
        self._platform, self._device, self._on, self._max_spans = platform, device, on, max_spans
        self._timed = platform.features.event_timing
        self._kept: list[tuple[Lane, int, Any, Any]] = []
        if on:
            self.restart()

    @property
    def is_on(self) -> bool:
        """Whether spans are recorded at all."""
        return self._on

    def restart(self) -> None:
        """Drop all spans and make now the origin. Blocks the host until the current stream gets here."""
        self._kept.clear()
        if self._timed:
            self._origin = self._mark(self._platform.current_stream(self._device))
            self._platform.synchronize_event(self._origin)
        self._host_origin = time.perf_counter()

    def span(self, lane: Lane, layer: int, stream: Stream | None = None) -> Recording:
        """Begin a span behind all that `stream` holds now, or at once without one.

        Begin a compute span only after its stream was made to wait for the layer's load: else the wait counts
        as compute.
        """
        if self._on and len(self._kept) < self._max_spans:
            return Recording(self, lane, layer, stream)
        return _OFF

    def spans(self) -> list[Span]:
        """Return the ended spans in order of their start. Blocks the host until the device reached them."""
        seconds = self._seconds
        spans = [
            Span(lane, layer, seconds(start), seconds(end)) for lane, layer, start, end in list(self._kept)
        ]
        return sorted(spans, key=lambda span: (span.start, span.end))

    def _mark(self, stream: Stream | None) -> Any:
        if stream is None or not self._timed:
            return time.perf_counter()
        event = self._platform.new_event(timing=True)
        self._platform.record(event, stream)
        return event

    def _keep(self, lane: Lane, layer: int, start: Any, stream: Stream | None) -> None:
        self._kept.append((lane, layer, start, self._mark(stream)))

    def _seconds(self, mark: Any) -> float:
        if isinstance(mark, float):
            return mark - self._host_origin
        self._platform.synchronize_event(mark)
        elapsed = self._platform.elapsed_ms(self._origin, mark)
        if elapsed is None:
            raise RuntimeError(
                f"platform {self._platform.name!r} says it has event_timing, but timed nothing"
            )
        return elapsed / 1e3


class LoadTimes(NamedTuple):
    """Seconds of load that compute covered, and seconds that compute waited for loads."""

    hidden_s: float
    exposed_s: float


def hidden_and_exposed(spans: Iterable[Span]) -> LoadTimes:
    """Tell how much of the loading was hidden behind compute and how much the model had to wait for.

    Hidden is the time in which a load and a compute span were under way together. Exposed is the sum, over
    the compute spans, of the idle time of the compute lane just before the span while its loads were missing:

    - a load belongs to the first compute span of its layer that starts when the load has ended, or later;
    - the wait begins where the compute span before ended, but not before the first load of this step began
      (so that an idle engine does not count, and a slow lower tier between two layers does);
    - the wait ends with the last load that belongs to the span;
    - a new step begins where the layer of compute does not grow.

    A load may be neither: one under way while compute is idle for another reason, or never computed upon.
    """
    spans = list(spans)
    loads = [span for span in spans if span.lane == "load"]
    compute = sorted((span for span in spans if span.lane == "compute"), key=lambda span: span.start)
    # Nothing in common, in sums of floats, can come out as less than nothing.
    hidden = max(0.0, _covered(loads) + _covered(compute) - _covered(loads + compute))
    return LoadTimes(hidden, _exposed(compute, _needed(loads, compute)))


def _covered(spans: Sequence[Span]) -> float:
    """Seconds in which at least one span is under way."""
    total, reached = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total


def _needed(loads: Sequence[Span], compute: Sequence[Span]) -> dict[Span, list[Span]]:
    by_layer: dict[int, list[Span]] = defaultdict(list)
    for span in compute:
        by_layer[span.layer].append(span)
    needed: dict[Span, list[Span]] = defaultdict(list)
    for load in loads:
        users = by_layer[load.layer]
        first = bisect_left(users, load.end - _ROUNDING_S, key=lambda span: span.start)
        for user in users[first : first + 1]:
            needed[user].append(load)
    return needed


def _steps(compute: Sequence[Span]) -> Iterator[list[Span]]:
    step: list[Span] = []
    for span in compute:
        if step and span.layer <= step[-1].layer:
            yield step
            step = []
        step.append(span)
    if step:
        yield step


def _exposed(compute: Sequence[Span], needed: dict[Span, list[Span]]) -> float:
    exposed, idle_since = 0.0, -math.inf
    for step in _steps(compute):
        asked = min((load.start for span in step for load in needed.get(span, ())), default=math.inf)
        for span in step:
            arrived = max((load.end for load in needed.get(span, ())), default=-math.inf)
            exposed += max(0.0, min(arrived, span.start) - max(asked, idle_since))
            idle_since = max(idle_since, span.end)
    return exposed
