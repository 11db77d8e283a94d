"""The tables of numbers in the documents are those of a recorded result."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lwkv.benchmarks.readme import table_of_moves, table_of_prefills

TREE = Path(__file__).parents[2]
RESULTS = TREE / "benchmarks" / "results"


RECORDED = RESULTS / "h200-2026-11-29-night.json"


def test_the_table_of_prefills_in_the_readme_is_made_from_the_recorded_result() -> None:
    assert table_of_prefills(json.loads(RECORDED.read_text())) in (TREE / "README.md").read_text()


def test_the_table_of_moves_in_the_documentation_is_made_from_the_recorded_result() -> None:
    assert table_of_moves(json.loads(RECORDED.read_text())) in (TREE / "docs" / "benchmarks.md").read_text()


def test_the_picture_in_the_readme_is_to_scale() -> None:
    times = _times_of(json.loads(RECORDED.read_text()), suffix=1024)
    picture = (TREE / "README.md").read_text().split("```")[1]
    bulk_load, bulk_compute, load, compute = re.findall("█+", picture)
    assert len(bulk_load) == len(load) == round(times["load_ms"])
    assert len(bulk_compute) == len(compute) == round(times["compute_ms"])
    assert re.findall(r"[\d.]+ ms$", picture, re.MULTILINE) == [
        f"{times['bulk_ms']:.1f} ms",
        f"{times['layerwise_ms']:.1f} ms",
    ]


def _times_of(result: dict[str, Any], suffix: int) -> dict[str, float]:
    (times,) = (
        item
        for item in result["parts"]["overlap"]["overlaps"]
        if item["prefix"] == result["prefix"] and item["suffix"] == suffix
    )
    return times


@pytest.mark.parametrize("path", sorted(RESULTS.glob("h200-2026*.json")), ids=lambda path: path.stem)
def test_every_recorded_result_found_its_bytes_right(path: Path) -> None:
    result = json.loads(path.read_text())
    assert result["faults"] == []
    assert all(move["exact"] for move in result["parts"]["moves"]["moves"])
    assert result["command"].startswith("lwkv bench --platform cuda")
