"""The README's tables of numbers, made from a recorded result: `python -m lwkv.benchmarks.readme RESULT`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def tables_of(result: dict[str, Any]) -> str:
    """Markdown of what one run of `lwkv bench --peers` found."""
    return "\n".join([*_moves(result["parts"]), "", *_prefills(result["parts"], result["prefix"])]) + "\n"


def _moves(parts: dict[str, Any]) -> Iterator[str]:
    peer = parts["peers"]
    yield f"| GB/s (share of a plain copy) | lwkv | {peer['label']}, layerwise | its bulk mode |"
    yield "|---|---|---|---|"
    for move in parts["moves"]["moves"]:
        theirs = {item["mode"]: item for item in peer["moves"] if item["name"] == move["name"]}
        cells = [_speed(move), *(_speed(theirs[mode]) for mode in ("layerwise", "bulk") if mode in theirs)]
        yield f"| {move['name']} | {' | '.join([*cells, *[''] * (3 - len(cells))])} |"


def _speed(move: dict[str, Any]) -> str:
    return f"{move['gb_s']:.1f} ({move['ratio']:.2f})"


def _prefills(parts: dict[str, Any], prefix: int) -> Iterator[str]:
    theirs = {item["suffix"]: item for item in parts["peers"]["overlaps"]}
    yield "| tokens | compute | load | by layers | over the larger | in bulk | LMCache layerwise | its bulk |"
    yield "|---|---|---|---|---|---|---|---|"
    for item in parts["overlap"]["overlaps"]:
        if item["prefix"] == prefix and item["suffix"] in theirs:
            peer = theirs[item["suffix"]]
            times = [item[name] for name in ("compute_ms", "load_ms", "layerwise_ms")]
            others = [item["bulk_ms"], peer["layerwise_ms"], peer["bulk_ms"]]
            cells = [*(f"{ms:.1f}" for ms in times), f"{item['ratio']:.2f}", *(f"{ms:.1f}" for ms in others)]
            yield f"| {item['suffix']} | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write(tables_of(json.loads(Path(sys.argv[1]).read_text())))
