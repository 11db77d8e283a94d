"""A timeline as a picture: the three lanes above, every layer's own row below.

Layers that were queued together are one bar: as wide as their lane has it, as tall as their rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lwkv.telemetry.timeline import LANES, Lane, Span, hidden_and_exposed
from lwkv.telemetry.timeline_groups import Group, group_spans

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
# The least width of a bar, of all the time that is shown: about two pixels.
_LEAST = 0.0015
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
    heights = [2.4, 0.6 + 0.24 * len(layers)]
    figure = Figure(figsize=(12, sum(heights) + 1.2), dpi=130, layout="constrained")
    lanes, rows = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    _draw_lanes(lanes, groups, origin)
    _draw_rows(rows, groups, layers, origin)
    figure.suptitle(f"{title}{_load_summary(spans)}", fontsize=13)
    figure.legend(*rows.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    if _has_early_save(spans):
        rows.set_xlabel(f"ms\n{_EARLY}")
    figure.savefig(path, format="png")


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


def _lanes(groups: Sequence[Group]) -> list[Lane]:
    there = {group.lane for group in groups}
    return [lane for lane in LANES if lane in there]


def _milliseconds(groups: Sequence[Group], origin: float) -> float:
    return (max(group.end for group in groups) - origin) * 1e3


def _bars(groups: Iterable[Group], origin: float, least: float) -> list[tuple[float, float]]:
    """Start and width in ms; nothing is narrower than `least` ms, which can be seen."""
    return [((group.start - origin) * 1e3, max(least, (group.end - group.start) * 1e3)) for group in groups]


def _draw_lanes(axes: Axes, groups: Sequence[Group], origin: float) -> None:
    shown = _lanes(groups)
    total = _milliseconds(groups, origin)
    for row, lane in enumerate(shown):
        mine = [group for group in groups if group.lane == lane]
        bars = _bars(mine, origin, _LEAST * total)
        axes.broken_barh(bars, (row - 0.38, 0.76), facecolors=_COLOURS[lane])
        axes.vlines([start for start, _ in bars[1:]], row - 0.38, row + 0.38, colors="white", lw=0.4)
        _name_bars(axes, row, mine, bars, _CHARACTER * total)
    axes.set_yticks(range(len(shown)), shown)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    _tidy(axes)


def _name_bars(
    axes: Axes, row: int, groups: Sequence[Group], bars: Sequence[tuple[float, float]], character: float
) -> None:
    """Write the layers into the part of each bar that no later one covers, if there is room in most bars."""
    starts = [start for start, _ in bars[1:]] + [float("inf")]
    fitting: list[tuple[float, str]] = []
    for group, (start, width), covered in zip(groups, bars, starts, strict=True):
        end = min(start + width, covered)
        if end - start > (len(group.name) + 0.5) * character:
            fitting.append(((start + end) / 2, group.name))
    for middle, name in fitting if 2 * len(fitting) > len(groups) else []:
        axes.text(middle, row, name, **_LABEL)


def _draw_rows(axes: Axes, groups: Sequence[Group], layers: Sequence[int], origin: float) -> None:
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
