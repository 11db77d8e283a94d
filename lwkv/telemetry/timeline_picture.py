"""A timeline as a picture: the three lanes above, every layer's own row below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lwkv.telemetry.timeline import LANES, Lane, Span, hidden_and_exposed

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


def draw_timeline(spans: Iterable[Span], path: str | Path, title: str = "Compute, load and save") -> None:
    """Draw `spans` into a PNG file; hidden and exposed load time go under the title.

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
    heights = [2.4, 0.6 + 0.24 * len(layers)]
    figure = Figure(figsize=(12, sum(heights) + 1.2), dpi=130, layout="constrained")
    lanes, rows = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    _draw_lanes(lanes, spans, origin)
    _draw_rows(rows, spans, layers, origin)
    figure.suptitle(f"{title}{_load_summary(spans)}", fontsize=13)
    figure.legend(*rows.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, format="png")


def _load_summary(spans: Sequence[Span]) -> str:
    if not any(span.lane == "load" for span in spans):
        return ""
    hidden, exposed = hidden_and_exposed(spans)
    return f"\nload time hidden behind compute {hidden * 1e3:.2f} ms, exposed {exposed * 1e3:.2f} ms"


def _lanes(spans: Sequence[Span]) -> list[Lane]:
    there = {span.lane for span in spans}
    return [lane for lane in LANES if lane in there]


def _milliseconds(spans: Sequence[Span], origin: float) -> float:
    return (max(span.end for span in spans) - origin) * 1e3


def _bars(spans: Iterable[Span], origin: float, least: float) -> list[tuple[float, float]]:
    """Start and width in ms; nothing is narrower than `least` ms, which can be seen."""
    return [((span.start - origin) * 1e3, max(least, (span.end - span.start) * 1e3)) for span in spans]


def _draw_lanes(axes: Axes, spans: Sequence[Span], origin: float) -> None:
    shown = _lanes(spans)
    total = _milliseconds(spans, origin)
    readable = 0.012 * total
    for row, lane in enumerate(shown):
        mine = [span for span in spans if span.lane == lane]
        bars = _bars(mine, origin, _LEAST * total)
        axes.broken_barh(bars, (row - 0.38, 0.76), facecolors=_COLOURS[lane])
        axes.vlines([start for start, _ in bars[1:]], row - 0.38, row + 0.38, colors="white", lw=0.4)
        for span, (start, width) in zip(mine, bars, strict=True):
            if width > readable:
                axes.text(start + width / 2, row, str(span.layer), **_LABEL)
    axes.set_yticks(range(len(shown)), shown)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    _tidy(axes)


def _draw_rows(axes: Axes, spans: Sequence[Span], layers: Sequence[int], origin: float) -> None:
    shown, least = _lanes(spans), _LEAST * _milliseconds(spans, origin)
    for place, lane in enumerate(shown):
        offset = (place - (len(shown) - 1) / 2) * _BAR
        label: str | None = _NAMES[lane]
        for row, layer in enumerate(layers):
            bars = _bars((s for s in spans if s.lane == lane and s.layer == layer), origin, least)
            y = row + offset - _BAR / 2
            axes.broken_barh(bars, (y, _BAR), facecolors=_COLOURS[lane], label=label)
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
