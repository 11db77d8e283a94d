from __future__ import annotations

import json
from pathlib import Path

import pytest

from lwkv.benchmarks import shared_host
from lwkv.benchmarks.shared_host import PROMPT_CHUNKS, Scale, measure


def test_look_ups_are_measured_alone_and_while_others_store(tmp_path: Path) -> None:
    found = measure(str(tmp_path / "host.sock"), Scale(3 * PROMPT_CHUNKS, 2, 2, 0.3, 20.0))
    assert found["chunks"] == 3 * PROMPT_CHUNKS
    assert found["index_bytes_per_chunk"] >= 0
    for times in [*found["lookup_ms"].values(), *found["pin_ms"].values()]:
        assert times["count"] > 0
        assert 0 < times["median"] <= times["p90"] <= times["p99"]


def test_it_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--chunks", "128", "--layers", "1", "--clients", "1", "--seconds", "0.1"]
    assert shared_host.main(options) == 0
    assert json.loads(capsys.readouterr().out)["clients"] == 1
