"""What is asked of blends in vLLM, and whether what was measured is that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np

MOST_OF_PREFILL = 0.30
"""A blend's time to first token, as a part of a full prefill's."""

MOST_OF_LARGER = 1.10
"""The same, as a part of the larger of loading and computing alone."""


@dataclass
class Found:
    """What was measured of one way to answer; times in milliseconds.

    Attributes:
        in_place_ms: to the first token where nothing is loaded, as if all were in its blocks.
        load_ms, compute_ms: a blend's loading and computing without vLLM's own step, each alone; `queued_ms`
            until all of its computing was launched.
        rest_ms: a prompt of the question alone, without a blend.
        beside_ms: between two tokens of requests that decode while such prompts arrive; for a full prefill by
            the prompts' rows.
        ttft_beside_ms: to the first token of these prompts, where they are blended.
        rows: that a blend computes, as so many in every layer: the prompts of plain prefill beside.
        faults: what went wrong; then the times mean nothing.
    """

    ttft_ms: list[float] = field(default_factory=list)
    in_place_ms: list[float] = field(default_factory=list)
    load_ms: list[float] = field(default_factory=list)
    compute_ms: list[float] = field(default_factory=list)
    queued_ms: list[float] = field(default_factory=list)
    rest_ms: list[float] = field(default_factory=list)
    beside_ms: dict[str, list[float]] = field(default_factory=dict)
    ttft_beside_ms: list[float] = field(default_factory=list)
    rows: int = 0
    counts: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def over_larger(self) -> float:
        """The time to first token over the larger of loading, and computing everything up to that token."""
        return median(self.ttft_ms) / max(median(self.load_ms), median(self.in_place_ms))

    def p99(self, rows: int) -> float:
        """Of the times between tokens beside prompts that compute so many rows."""
        return float(np.percentile(self.beside_ms[str(rows)], 99))

    def summary(self) -> dict[str, float | int]:
        """Medians, and percentiles between tokens."""
        names = ("ttft", "in_place", "load", "compute", "queued", "rest", "ttft_beside")
        times: dict[str, list[float]] = {name: getattr(self, f"{name}_ms") for name in names}
        row: dict[str, float | int] = {name: round(median(ms), 2) for name, ms in times.items() if ms}
        for rows, ms in self.beside_ms.items():
            row |= {
                f"beside_{rows}_p{share}": round(float(np.percentile(ms, share)), 2)
                for share in (50, 99, 100)
                if ms
            }
        return row


class Gate(NamedTuple):
    """One thing that is asked, in words, with what was measured and the most that it may be."""

    what: str
    found: float
    most: float

    @property
    def holds(self) -> bool:
        return self.found <= self.most

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "DOES NOT HOLD"
        return f"{verdict}: {self.what}: {self.found:.3f}, at most {self.most:.3f}"


def gates(found: Mapping[str, Found]) -> Iterator[Gate]:
    """All that can be said of what was measured, by the name of the selector; `plain` is a full prefill."""
    plain = found.get("plain")
    for name, one in found.items():
        if one is plain:
            continue
        if plain is not None and plain.ttft_ms and one.ttft_ms:
            part = median(one.ttft_ms) / median(plain.ttft_ms)
            yield Gate(f"{name}: time to first token over a full prefill's", part, MOST_OF_PREFILL)
        if one.load_ms and one.in_place_ms and one.ttft_ms:
            larger = "loading" if median(one.load_ms) > median(one.in_place_ms) else "computing"
            what = f"{name}: time to first token over that of {larger} alone"
            yield Gate(what, one.over_larger, MOST_OF_LARGER)
        rows = str(one.rows)
        if plain is not None and plain.beside_ms.get(rows) and one.beside_ms.get(rows):
            what = f"{name}: p99 in ms between tokens of others, beside prefills of {rows} tokens at most"
            yield Gate(what, one.p99(one.rows), plain.p99(one.rows))
