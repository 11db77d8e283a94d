"""A timeline as a picture: the three lanes above, every layer's own row below.

Layers that were queued together are one bar: as wide as their lane has it, as tall as their rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lwkv.telemetry.timeline import LANES, Lane, Span, hidden_and_exposed
from lwkv.telemetry.timeline_groups import SpanGroup, forward_passes, group_spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Blue, vermilion and green of Okabe and Ito, which colour-blind readers can tell apart.
_COLOURS: dict[Lane, str] = {"load": "#0072B2", "compute": "#D55E00", "save": "#009E73"}
_NAMES: dict[Lane, str] = {
    "load": "load (host to device)",
    "compute": "compute",
    "save": "save (device to host)",
}
_LABEL: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7, "color": "white"}
_BAR = 0.28
_MOST_ROW, _LEAST_ROW, _ROWS = 0.24, 0.13, 8.0
# The least width of a bar, of all the time that is shown: about two pixels.
_LEAST = 0.0015
# Bars whose starts are this close, in parts of the first one, began together.
_TOGETHER = 0.05
# The width of a character, of the same.
_CHARACTER = 0.006
_EARLY = "A save waits for its layer's KV, which is there before the computing of the layer ends."


def draw_timeline(spans: Iterable[Span], path: str | Path, title: str = "Compute, load and save") -> None:
    """Draw `spans` into a PNG file; hidden and exposed load time go under the title.

    Layers that were loaded or saved together are drawn as one.

    Raises:
        ValueError: there is no span to draw.
        RuntimeError: matplotlib is not installed.
    """
    spans = list(spans)
    if not spans:
        raise ValueError("no spans to draw: was the timeline on, and had the spans ended?")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("a picture needs matplotlib: pip install '.[demo]' in lwkv's folder") from error
    layers = sorted({span.layer for span in spans})
    origin = min(span.start for span in spans)
    groups = group_spans(spans)
    heights = [2.4, 0.6 + _row_height(len(layers)) * len(layers)]
    figure = Figure(figsize=(12, sum(heights) + 1.2), dpi=130, layout="constrained")
    lanes, rows = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    _draw_lanes(lanes, groups, origin)
    _draw_rows(rows, groups, layers, origin)
    _mark_passes(lanes, rows, groups, origin)
    figure.suptitle(f"{title}{_load_summary(spans)}", fontsize=13)
    figure.legend(*rows.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    if _has_early_save(spans):
        rows.set_xlabel(f"ms\n{_EARLY}")
    figure.savefig(path, format="png")


def _row_height(num_layers: int) -> float:
    """The height of a layer's row in inches: less for many layers, and never less than its number needs."""
    return max(_LEAST_ROW, min(_MOST_ROW, _ROWS / num_layers))


def _has_early_save(spans: Sequence[Span]) -> bool:
    """Whether a save begins within the computing of its own layer."""
    saves = {span.layer: span for span in spans if span.lane == "save"}
    computed = [span for span in spans if span.lane == "compute" and span.layer in saves]
    return any(span.start < saves[span.layer].start < span.end for span in computed)


def _load_summary(spans: Sequence[Span]) -> str:
    if not any(span.lane == "load" for span in spans):
        return ""
    hidden, exposed = hidden_and_exposed(spans)
    return f"\nload time hidden behind compute {hidden * 1e3:.2f} ms, exposed {exposed * 1e3:.2f} ms"


def _lanes(groups: Sequence[SpanGroup]) -> list[Lane]:
    there = {group.lane for group in groups}
    return [lane for lane in LANES if lane in there]


def _milliseconds(groups: Sequence[SpanGroup], origin: float) -> float:
    return (max(group.end for group in groups) - origin) * 1e3


def _bars(groups: Iterable[SpanGroup], origin: float, least: float) -> list[tuple[float, float]]:
    """Start and width in ms; nothing is narrower than `least` ms, which can be seen."""
    return [((group.start - origin) * 1e3, max(least, (group.end - group.start) * 1e3)) for group in groups]


def _draw_lanes(axes: Axes, groups: Sequence[SpanGroup], origin: float) -> None:
    shown = _lanes(groups)
    total = _milliseconds(groups, origin)
    for row, lane in enumerate(shown):
        mine = [group for group in groups if group.lane == lane]
        bars = _one_after_the_other(_bars(mine, origin, _LEAST * total))
        axes.broken_barh(bars, (row - 0.38, 0.76), facecolors=_COLOURS[lane], snap=False)
        axes.vlines(_seams(bars, _LEAST * total), row - 0.38, row + 0.38, colors="white", lw=0.4)
        _name_bars(axes, row, mine, bars, _CHARACTER * total)
    axes.set_yticks(range(len(shown)), shown)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    _tidy(axes)
    axes.tick_params(axis="x", labelbottom=True)  # the rows' own may be far below


def _one_after_the_other(bars: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same bars, but one that begins together with the one before it begins where that one ends."""
    apart: list[tuple[float, float]] = []
    for start, width in bars:
        before = apart[-1] if apart else (start, 0.0)
        covered = min(before[0] + before[1] - start, width)
        begins_together = start - before[0] <= _TOGETHER * before[1]
        skipped = covered if begins_together and 0 < covered < width else 0.0
        apart.append((start + skipped, width - skipped))
    return apart


def _mark_passes(lanes: Axes, rows: Axes, groups: Sequence[SpanGroup], origin: float) -> None:
    """Draw a line where each of several forward passes begins, with its number if there is room."""
    starts = [(start - origin) * 1e3 for start in forward_passes(groups)]
    if len(starts) < 2:
        return
    total = _milliseconds(groups, origin)
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], total], strict=True), 1):
        for axes in (lanes, rows):
            axes.axvline(start, color="0.4", lw=0.8, ls=":", zorder=0.5)
        name = f"forward pass {number}"
        if end - start > len(name) * _CHARACTER * total:
            lanes.text(start, -0.52, name, fontsize=7, color="0.3", va="bottom")


def _seams(bars: Sequence[tuple[float, float]], least: float) -> list[float]:
    """Where a bar begins within the one before it or right behind it, as far as both can be seen."""
    return [
        start
        for (before, width), (start, own) in pairwise(bars)
        if start < before + width + least and min(width, own) > 2 * least
    ]


def _name_bars(
    axes: Axes, row: int, groups: Sequence[SpanGroup], bars: Sequence[tuple[float, float]], character: float
) -> None:
    """Write the layers into the part of each bar that no later one covers, if there is room in most bars of
    a pass through the layers."""
    starts = [start for start, _ in bars[1:]] + [float("inf")]
    passes: list[list[tuple[float, str] | None]] = []
    for group, (start, width), covered in zip(groups, bars, starts, strict=True):
        end = min(start + width, covered)
        fits = end - start > (len(group.name) + 0.5) * character
        if not passes or group.first == groups[0].first:
            passes.append([])
        passes[-1].append(((start + end) / 2, group.name) if fits else None)
    for places in passes:
        fitting = [place for place in places if place]
        for middle, name in fitting if 2 * len(fitting) > len(places) else []:
            axes.text(middle, row, name, **_LABEL)


def _draw_rows(axes: Axes, groups: Sequence[SpanGroup], layers: Sequence[int], origin: float) -> None:
    shown, total = _lanes(groups), _milliseconds(groups, origin)
    least = _LEAST * total
    row_of = {layer: row for row, layer in enumerate(layers)}
    for place, lane in enumerate(shown):
        offset = (place - (len(shown) - 1) / 2) * _BAR - _BAR / 2
        label: str | None = _NAMES[lane]
        for group in (group for group in groups if group.lane == lane):
            first, last = row_of[group.first], row_of[group.last]
            heights = (first + offset, last - first + _BAR)
            bars = _bars([group], origin, least)
            # What is as tall as several rows hides nothing of them.
            order = 1 if first < last else 2
            axes.broken_barh(bars, heights, facecolors=_COLOURS[lane], label=label, zorder=order)
            if first < last and bars[0][1] > (len(group.name) + 0.5) * _CHARACTER * total:
                axes.text(bars[0][0] + bars[0][1] / 2, (first + last) / 2, group.name, **_LABEL)
            label = None
    for row in range(1, len(layers), 2):
        axes.axhspan(row - 0.5, row + 0.5, color="0.95", zorder=0)
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers], fontsize=8)
    axes.set_ylim(len(layers) - 0.5, -0.5)
    axes.set_xlabel("ms")
    axes.set_ylabel("layer")
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="0.88")
    axes.margins(x=0.01)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
