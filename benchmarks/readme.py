"""Tables of numbers for the README and docs/benchmarks.md: `python -m lwkv.benchmarks.readme RESULT`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def table_of_moves(result: dict[str, Any]) -> str:
    """Markdown of the loads and saves that one run of `lwkv bench --peers` measured."""
    return "\n".join(_moves(result["parts"])) + "\n"


def table_of_prefills(result: dict[str, Any]) -> str:
    """Markdown of the prefills over a cached prefix that the same run measured."""
    return "\n".join(_prefills(result["parts"], result["prefix"])) + "\n"


def _moves(parts: dict[str, Any]) -> Iterator[str]:
    peer = parts["peers"]
    yield f"| GB/s (share of a plain copy) | lwkv | {peer['label']}, layerwise | {peer['label']}, bulk |"
    yield "|---|---|---|---|"
    for move in parts["moves"]["moves"]:
        theirs = {item["mode"]: item for item in peer["moves"] if item["name"] == move["name"]}
        cells = [_speed(move), *(_speed(theirs[mode]) for mode in ("layerwise", "bulk") if mode in theirs)]
        yield f"| {move['name']} | {' | '.join([*cells, *[''] * (3 - len(cells))])} |"


def _speed(move: dict[str, Any]) -> str:
    return f"{move['gb_s']:.1f} ({move['ratio']:.2f})"


def _prefills(parts: dict[str, Any], prefix: int) -> Iterator[str]:
    theirs = {item["suffix"]: item for item in parts["peers"]["overlaps"]}
    peer = parts["peers"]["label"]
    lwkv = "new tokens | compute | load | layer by layer | ratio | in bulk"
    yield f"| {lwkv} | {peer}, layerwise | {peer}, bulk |"
    yield "|---|---|---|---|---|---|---|---|"
    for item in parts["overlap"]["overlaps"]:
        if item["prefix"] == prefix and item["suffix"] in theirs:
            other = theirs[item["suffix"]]
            times = [item[name] for name in ("compute_ms", "load_ms", "layerwise_ms")]
            others = [item["bulk_ms"], other["layerwise_ms"], other["bulk_ms"]]
            cells = [*(f"{ms:.1f}" for ms in times), f"{item['ratio']:.2f}", *(f"{ms:.1f}" for ms in others)]
            yield f"| {item['suffix']} | {' | '.join(cells)} |"


if __name__ == "__main__":
    recorded = json.loads(Path(sys.argv[1]).read_text())
    sys.stdout.write(table_of_prefills(recorded) + "\n" + table_of_moves(recorded))
