"""What page codecs change in answers, with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from demo_model import write_model

from lwkv.benchmarks.page_quality import main
from lwkv.reference import read_document


def test_lossless_pages_change_no_bit_of_a_logit_and_fp8_changes_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "tiny", f"{read_document()} The code of works at stands in town")
    output = ["--output", str(tmp_path), "--platform", "cpu"]
    assert main(["--model", str(model), "--tasks", "1", *output]) == 0
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "page_quality.json").read_text())
    for kind, num_prompts in (("needles", 1), ("two hops", 1), ("demo", 2)):
        assert f"{kind}: {num_prompts} prompts, KL divergence in nats" in shown
        assert len(report[kind]) == num_prompts
        for outcome in report[kind]:
            assert outcome["raw"]["bits_differ"] == outcome["lossless"]["bits_differ"] == 0
            assert outcome["lossless"]["kl"] == outcome["raw"]["kl"]
            assert outcome["fp8"]["bits_differ"] > 0
            assert 0 <= outcome["fp8"]["from_raw"] < 1
