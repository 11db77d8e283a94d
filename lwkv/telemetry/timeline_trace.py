"""A timeline as a file for a trace viewer."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from lwkv.telemetry.timeline import LANES, Lane, Span


def write_trace(spans: Iterable[Span], path: str | Path) -> None:
    """Write `spans` as a Chrome trace, in microseconds; Perfetto and chrome://tracing open it."""
    rows: dict[tuple[Lane, int], int] = {}
    events = []
    for span, depth in _side_by_side(spans):
        row = rows.setdefault((span.lane, depth), len(LANES) * depth + LANES.index(span.lane))
        events.append(_trace_event(span, row))
    names = [_trace_names(lane, depth, row) for (lane, depth), row in rows.items()]
    Path(path).write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}))


def _side_by_side(spans: Iterable[Span]) -> Iterator[tuple[Span, int]]:
    """Number the spans of a lane that overlap: a viewer cannot show two at once in one row."""
    ends: dict[Lane, list[float]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start):
        row_ends = ends[span.lane]
        depth = next((i for i, end in enumerate(row_ends) if end <= span.start), len(row_ends))
        row_ends[depth : depth + 1] = [span.end]
        yield span, depth


def _trace_event(span: Span, row: int) -> dict[str, object]:
    times = {"ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6}
    names = {"name": f"{span.lane} {span.layer}", "cat": span.lane, "args": {"layer": span.layer}}
    return {"ph": "X", "pid": 0, "tid": row, **names, **times}


def _trace_names(lane: Lane, depth: int, row: int) -> dict[str, object]:
    name = f"{lane} ({depth + 1})" if depth else lane
    return {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}
