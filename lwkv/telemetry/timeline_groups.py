"""Spans that are one piece of work, which a picture shows as one bar, and those of one forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from lwkv.telemetry.timeline import Lane, Span

# Spans of one piece of work begin and end one event after the other.
_APART = 0.05


@dataclass(frozen=True, slots=True)
class SpanGroup:
    """Layers `first` to `last` of a lane, from the first start to the last end, in seconds."""

    lane: Lane
    first: int
    last: int
    start: float
    end: float

    @property
    def name(self) -> str:
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"


def group_spans(spans: Iterable[Span]) -> list[SpanGroup]:
    """Join spans of neighbouring layers of a lane that began and ended together; in order of their start.

    Together means: within a twentieth of what they take. Layers that are computed are never joined, only the
    pieces of one layer that follow each other.
    """
    groups: list[SpanGroup] = []
    for span in sorted(spans, key=lambda span: (span.lane, span.layer, span.start)):
        last = groups[-1] if groups else None
        if last is not None and _is_together(last, span):
            start, end = min(last.start, span.start), max(last.end, span.end)
            groups[-1] = SpanGroup(span.lane, last.first, span.layer, start, end)
        else:
            groups.append(SpanGroup(span.lane, span.layer, span.layer, span.start, span.end))
    return sorted(groups, key=lambda group: (group.start, group.first))


def forward_passes(groups: Iterable[SpanGroup]) -> list[float]:
    """When each forward pass begins: where an earlier layer is computed than the one before it."""
    computed = [group for group in groups if group.lane == "compute"]
    later = [group.start for before, group in pairwise(computed) if group.first < before.last]
    return [group.start for group in computed[:1]] + later


def _is_together(group: SpanGroup, span: Span) -> bool:
    if span.lane == group.lane == "compute":
        pause = span.start - group.end
        return span.layer == group.last and pause <= _APART * (span.end - group.start)
    if span.lane == "compute" or span.lane != group.lane or span.layer != group.last + 1:
        return False
    apart = max(abs(span.start - group.start), abs(span.end - group.end))
    return apart <= _APART * max(span.end - span.start, group.end - group.start)
