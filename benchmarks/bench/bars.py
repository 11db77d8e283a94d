"""A result as a picture: moves against the ceiling, and prefills of suffixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lwkv.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of Okabe and Ito, which colour-blind readers can tell apart.
BLUE, VERMILION, GREEN, GREY, ORANGE, PURPLE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#999999",
    "#E69F00",
    "#CC79A7",
)
_MOST_LEVEL = 24  # bars of a panel
_WAYS = {
    "compute_ms": ("compute alone", GREY),
    "load_ms": ("load alone", BLUE),
    "layerwise_ms": ("lwkv, layer by layer", GREEN),
    "bulk_ms": ("lwkv, bulk, then compute", ORANGE),
}
_PEER_WAYS = {
    "layerwise_ms": ("layer by layer", VERMILION),
    "bulk_ms": ("bulk, then compute", PURPLE),
}


def draw_bars(result: Mapping[str, Any], path: str | Path) -> bool:
    """Draw a result, as its JSON has it, into a PNG file; False where it has neither moves nor overlap.

    Raises ConfigError where matplotlib is not installed.
    """
    parts = result["parts"]
    panels = [(draw, parts[name]) for name, draw in _PANELS.items() if name in parts]
    if not panels:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib: pip install '.[bench]' in lwkv's folder") from error
    figure = Figure(figsize=(7 * len(panels), 5.5), dpi=130, layout="constrained")
    for axes, (draw, part) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axes, result, part)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color="0.88")
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    shape, tokens = result["shape"]["name"], result["prefix"]
    figure.suptitle(f"{result['device']}, {shape}, {tokens} tokens cached; {result['date'][:10]}")
    figure.savefig(path, format="png")
    return True


def _draw_moves(axes: Axes, result: Mapping[str, Any], part: Mapping[str, Any]) -> None:
    moves, peer = part["moves"], _peer(result)
    bars = [("lwkv", GREEN, {move["name"]: move["ratio"] for move in moves})]
    if peer:
        for mode, colour in (("layerwise", VERMILION), ("bulk", PURPLE)):
            mine = [move for move in peer["moves"] if move["mode"] == mode]
            bars.append((f"{peer['label']}, {mode}", colour, {move["name"]: move["ratio"] for move in mine}))
    names = [move["name"] for move in moves]
    _draw_groups(axes, names, bars, "{:.2f}")
    axes.axhline(1, color="black", lw=1, ls="--", label="a plain page-locked copy")
    axes.set_ylabel("speed, as a share of the plain copy's")
    axes.set_title("Loads and saves")


def _draw_overlap(axes: Axes, result: Mapping[str, Any], part: Mapping[str, Any]) -> None:
    runs = [run for run in part["overlaps"] if run["prefix"] == result["prefix"]]
    names = [str(run["suffix"]) for run in runs]
    bars = [
        (label, colour, {str(run["suffix"]): run[key] for run in runs})
        for key, (label, colour) in _WAYS.items()
    ]
    peer = _peer(result)
    for key, (label, colour) in _PEER_WAYS.items() if peer else ():
        values = {str(run["suffix"]): run[key] for run in peer["overlaps"]}
        bars.append((f"{peer['label']}, {label}", colour, values))
    _draw_groups(axes, names, bars, "{:.3g}")
    axes.set_xlabel("tokens computed over the cached prefix")
    axes.set_ylabel("ms")
    axes.set_title(f"Prefill without stores, medians of {result['repeats']} runs")


def _peer(result: Mapping[str, Any]) -> Mapping[str, Any]:
    peer: Mapping[str, Any] = result["parts"].get("peers", {})
    return peer if "moves" in peer else {}


def _draw_groups(
    axes: Axes, names: Sequence[str], bars: Sequence[tuple[str, str, Mapping[str, float]]], form: str
) -> None:
    width = 0.8 / len(bars)
    # Where bars are narrower than their numbers, these stand upright.
    upright = 90 if len(bars) * len(names) > _MOST_LEVEL else 0
    for number, (label, colour, values) in enumerate(bars):
        places, heights = [], []
        for place, name in enumerate(names):
            if name in values:  # the bars that a group has are in its middle
                there = [i for i, (_, _, others) in enumerate(bars) if name in others]
                places.append(place + (there.index(number) - (len(there) - 1) / 2) * width)
                heights.append(values[name])
        drawn = axes.bar(places, heights, width, color=colour, label=label)
        axes.bar_label(
            drawn, [form.format(height) for height in heights], fontsize=6, padding=2, rotation=upright
        )
    axes.set_xticks(range(len(names)), list(names))
    axes.set_xlim(-0.6, len(names) - 0.4)


_PANELS = {"moves": _draw_moves, "overlap": _draw_overlap}
