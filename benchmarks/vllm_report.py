"""Tables and a picture of what `vllm_serving` and `vllm_conversations` found, for docs/vllm.md.

`python -m lwkv.benchmarks.vllm_report RESULT... --picture FILE.svg` joins the engines of several results.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lwkv.benchmarks.bench.bars import BLUE, GREEN, GREY, VERMILION
from lwkv.benchmarks.measuring.timing import percentile
from lwkv.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCHEMA = 2
NAMES = {
    "plain": "no cache",
    "native": "vLLM's own offloading",
    "lmcache": "LMCache",
    "lwkv": "lwkv",
    "lwkv-raw": "lwkv, raw pages",
    "lwkv-lossless": "lwkv, lossless pages",
    "lwkv-bulk": "lwkv, `use_layerwise: false`",
    "lwkv-disk": "lwkv from disk",
    "lwkv-1000": "lwkv from a store of 1 GB/s",
    "lwkv-100": "lwkv from a store of 100 MB/s",
}
ALONE, BESIDE = "alone", "beside"
Found = Mapping[str, Any]
Column = tuple[str, Callable[[Found], float]]


def load(paths: Sequence[Path]) -> dict[str, Any]:
    """The results of several runs as one. Raises ConfigError for a file of another form."""
    results = [json.loads(path.read_text()) for path in paths]
    for path, result in zip(paths, results, strict=True):
        if not isinstance(result, dict) or result.get("schema") != SCHEMA:
            raise ConfigError(f"{path}: not a result of vllm_serving or vllm_conversations, schema {SCHEMA}")
    return {"findings": [finding for result in results for finding in result["findings"]]}


def tables(result: Found) -> Iterator[str]:
    """Markdown, line by line: what comes alone, what comes beside requests that decode, conversations."""
    findings = result["findings"]
    batches = dict.fromkeys(name for each in findings for name in each["served"] if name.startswith("decode"))
    decoding = [(f"between tokens, {name.replace('decode', 'batch')}", _gap(name, 0.5)) for name in batches]
    alone = [_first(ALONE, 0.5), _first(ALONE, 0.99), ("first cold prompt", _first_cold), ("cold", _cold)]
    yield from _table(findings, [*alone, *decoding, ("start, s", lambda each: float(each["start_s"]))])
    gaps = [(f"between tokens, {name}", _gap(BESIDE, share)) for name, share in SHARES.items()]
    yield from _table(
        [each for each in findings if BESIDE in each["served"]],
        [_first(BESIDE, 0.5), _first(BESIDE, 0.99), *gaps, ("decoded tokens/s", _decoded_a_second)],
    )
    talks = [each for each in findings if each["conversed"]]
    shares = [("cached share of all prompts", _cached_share), ("answers/s", _answers_a_second)]
    yield from _table(talks, [("TTFT of later turns, p50", _later(0.5)), ("p99", _later(0.99)), *shares])


SHARES = {"p50": 0.5, "p99": 0.99, "longest": 1.0}


def _table(findings: Sequence[Found], columns: Sequence[Column]) -> Iterator[str]:
    """Columns of which an engine has something, to three digits or the millisecond's tenth."""
    rows = [(each["mode"], [value(each) for _, value in columns]) for each in findings]
    used = [place for place in range(len(columns)) if any(not math.isnan(row[place]) for _, row in rows)]
    if not used:
        return
    yield "| | " + " | ".join(columns[place][0] for place in used) + " |"
    yield "|---" * (len(used) + 1) + "|"
    for mode, row in rows:
        yield f"| {_name(mode)} | " + " | ".join(_shown(row[place]) for place in used) + " |"
    yield ""


def _name(mode: str) -> str:
    """For readers; modes of other benchmarks are named so already."""
    return NAMES.get(mode, mode)


def _shown(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _served(each: Found, name: str) -> Found:
    found: Found = each["served"].get(name, {"ttft_ms": [], "gaps_ms": [], "cold_ms": [], "seconds": 0})
    return found


def _first(name: str, share: float) -> Column:
    def value(each: Found) -> float:
        return percentile(_served(each, name)["ttft_ms"], share)

    return (f"TTFT p{share * 100:.0f}", value)


def _gap(name: str, share: float) -> Callable[[Found], float]:
    return lambda each: percentile(_served(each, name)["gaps_ms"], share)


def _colds(each: Found) -> list[float]:
    return [ms for served in each["served"].values() for ms in served["cold_ms"]]


def _first_cold(each: Found) -> float:
    return _colds(each)[0] if _colds(each) else math.nan


def _cold(each: Found) -> float:
    """Of all but the first."""
    return median(_colds(each)[1:]) if len(_colds(each)) > 1 else math.nan


def _decoded_a_second(each: Found) -> float:
    beside = _served(each, BESIDE)
    return float(beside["decoded"] / beside["seconds"]) if beside["seconds"] else math.nan


def _later(share: float) -> Callable[[Found], float]:
    """Of all turns but each conversation's first."""

    def value(each: Found) -> float:
        found = each["conversed"]
        later = [ms for (_, turn), ms in zip(found["turns"], found["ttft_ms"], strict=True) if turn]
        return percentile(later, share)

    return value


def _cached_share(each: Found) -> float:
    found = each["conversed"]
    return float(sum(found["cached"]) / sum(found["prompts"])) if found["prompts"] else math.nan


def _answers_a_second(each: Found) -> float:
    found = each["conversed"]
    return float(len(found["turns"]) / found["seconds"]) if found["seconds"] else math.nan


def draw(result: Found, path: Path) -> None:
    """Draw the loads beside requests that decode, and prompts alone, into an SVG file.

    Raises ConfigError where matplotlib is not installed, or there is nothing to draw.
    """
    findings = [each for each in result["findings"] if BESIDE in each["served"]]
    if not findings:
        raise ConfigError("these results have no load beside requests that decode: nothing to draw")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib: pip install '.[bench]' in lwkv's folder") from error
    # Text stays text, and the same results give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lwkv"}):
        figure = Figure(figsize=(12, 1.4 + 0.42 * len(findings)), layout="constrained")
        panels = figure.subplots(1, 3, sharey=True)
        _draw_panel(panels[0], findings, "time to first token, ms", {
            "alone, p50": (GREY, _first(ALONE, 0.5)[1]),
            "beside 16 that decode, p50": (GREEN, _first(BESIDE, 0.5)[1]),
        })  # fmt: skip
        _draw_panel(panels[1], findings, "between two tokens of those that decode, ms", {
            "p50": (BLUE, _gap(BESIDE, 0.5)), "p99": (VERMILION, _gap(BESIDE, 0.99)),
        })  # fmt: skip
        speeds = {"of those that decode": (BLUE, _decoded_a_second)}
        _draw_panel(panels[2], findings, "decoded tokens a second", speeds)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _draw_panel(
    axes: Axes,
    findings: Sequence[Found],
    title: str,
    bars: Mapping[str, tuple[str, Callable[[Found], float]]],
) -> None:
    """A group of bars for each engine, the first at the top."""
    height = 0.8 / len(bars)
    for number, (label, (colour, value)) in enumerate(bars.items()):
        values = [value(each) for each in findings]
        places = [place + (number - (len(bars) - 1) / 2) * height for place in range(len(findings))]
        drawn = axes.barh(places, [0 if math.isnan(each) else each for each in values], height, color=colour)
        drawn.set_label(label)
        axes.bar_label(drawn, [_shown(each) for each in values], fontsize=8, padding=2)
    names = [_name(each["mode"]).replace("`", "") for each in findings]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.15)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if len(bars) > 1:
        axes.legend(frameon=False, fontsize=8, loc="lower right")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lwkv.benchmarks.vllm_report", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="files that vllm_serving wrote")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="an SVG file to draw into")
    args = parser.parse_args()
    result = load(args.results)
    print("\n".join(tables(result)))
    if args.picture:
        draw(result, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
