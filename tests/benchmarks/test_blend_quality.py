"""The longer evaluation of blending, with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from demo_model import write_model

from lwkv.benchmarks.blend_quality import KINDS, difference, main, ways
from lwkv.benchmarks.blending.tasks import cut_facts, look_alikes, needle, two_hops
from lwkv.reference import read_document


def test_it_tells_every_way_of_every_kind_and_keeps_all_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "tiny", f"{read_document()} The code of works at stands in town")
    assert main(["--model", str(model), "--tasks", "1", "--output", str(tmp_path), "--platform", "cpu"]) == 0
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "blend_quality.json").read_text())
    assert report["cost"]["tokens"] > 1500
    assert report["cost"]["ratio"] > 0
    assert f"of a prompt of {report['cost']['tokens']} tokens: process time over full" in shown
    for kind in KINDS:
        assert f"{kind}: mean KL divergence from full prefill in nats, 1 tasks" in shown
        assert len(report[kind]) == len(ways(3))
        for figures in report[kind].values():
            assert len(figures["kl"]) == len(figures["cost"]) == 1
            assert figures["kl"][0] >= -1e-6


def test_the_same_seed_makes_the_same_task_and_its_answer_stands_in_one_document() -> None:
    for make in (needle, look_alikes, two_hops, cut_facts):
        tasks = [make(seed) for seed in range(20)]
        assert [make(seed) for seed in range(20)] == tasks
        assert len({task.question for task in tasks}) > 10
        for task in tasks:
            assert sum(task.answer in document for document in task.documents) == 1
            assert len(task.documents) == 5


def test_the_difference_of_two_ways_is_reported_with_its_uncertainty() -> None:
    low, high = difference([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
    assert 1.0 <= low < 2.0 < high <= 3.0
    assert difference([1.0, 5.0], [1.0, 5.0]) == (0.0, 0.0)
