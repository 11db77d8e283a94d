"""The README's numbers are those of a recorded result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lwkv.benchmarks.readme import tables_of

TREE = Path(__file__).parents[2]
RESULTS = TREE / "benchmarks" / "results"


def test_the_tables_of_the_readme_are_made_from_the_recorded_result() -> None:
    result = json.loads((RESULTS / "h200-2026-11-29-night.json").read_text())
    assert tables_of(result).strip() in (TREE / "README.md").read_text()


@pytest.mark.parametrize("path", sorted(RESULTS.glob("h200-2026*.json")), ids=lambda path: path.stem)
def test_every_recorded_result_found_its_bytes_right(path: Path) -> None:
    result = json.loads(path.read_text())
    assert result["faults"] == []
    assert all(move["exact"] for move in result["parts"]["moves"]["moves"])
    assert result["command"].startswith("lwkv bench --platform cuda")
