from __future__ import annotations

import json

import pytest

from lwkv.benchmarks.vllm_scheduler import main


def test_steps_with_and_without_work_and_lookups_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--requests", "2", "3", "--tokens", "520", "--steps", "4"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["requests"]) == {"2", "3"}
    for figures in (
        *report["requests"]["2"].values(),
        *report["requests"]["3"].values(),
        report["waiting_us"],
    ):
        assert 0 < figures["median"] <= figures["longest"]
