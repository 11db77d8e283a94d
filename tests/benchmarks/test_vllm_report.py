from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lwkv.benchmarks.vllm.conversations import Conversed
from lwkv.benchmarks.vllm.engines import MODES
from lwkv.benchmarks.vllm.load import Served
from lwkv.benchmarks.vllm_report import NAMES, draw, load, tables
from lwkv.benchmarks.vllm_serving import Finding, Plan, write_result
from lwkv.errors import ConfigError

PLAN = Plan((8,), seconds=4, every_s=1, prefix=64, suffix=8, alone=2)


def finding(mode: str, ms: float) -> Finding:
    served = {
        "decode 8": Served(gaps_ms=[5.0, 5.25, 6.0], seconds=1.0, decoded=8),
        "alone": Served([ms] * 2, [], 1.0, 0, [64] * 2, [1, 2], [400.0, 200.0]),
        "beside": Served([ms, ms + 3, ms + 1], [4.0, 5.0, 60.0], 2.0, 500, [64] * 3, [1, 2, 3], [210.0]),
    }
    return Finding(
        mode, 61.5, served, Conversed([(0, 0), (0, 1)], [220.0, ms], [0, 64], [64, 128], [1, 2], 4.0)
    )


@pytest.fixture
def result(tmp_path: Path) -> Path:
    path = tmp_path / "result.json"
    assert write_result(path, [finding("plain", 220.0), finding("lwkv", 25.125)], []) == 0
    return path


def test_the_tables_have_a_row_for_each_engine(result: Path) -> None:
    alone, beside, talks = "\n".join(tables(load([result]))).strip().split("\n\n")
    assert alone.splitlines() == [
        "| | TTFT p50 | TTFT p99 | first cold prompt | cold | between tokens, batch 8 | start, s |",
        "|---|---|---|---|---|---|---|",
        "| no cache | 220 | 220 | 400 | 205 | 5.25 | 61.5 |",
        "| lwkv | 25.1 | 25.1 | 400 | 205 | 5.25 | 61.5 |",
    ]
    assert beside.splitlines()[3] == "| lwkv | 26.1 | 28.1 | 5.00 | 60.0 | 60.0 | 250 |"
    assert talks.splitlines()[3] == "| lwkv | 25.1 | 25.1 | 0.33 | 0.50 |"


def test_results_of_several_runs_are_joined_and_columns_that_nobody_has_are_left_out(
    result: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    beside = {"beside": finding("lwkv-100", 211.0).served["beside"]}
    write_result(other, [Finding("lwkv-100", 50.0, beside)], [])
    alone, both, talks = "\n".join(tables(load([result, other]))).strip().split("\n\n")
    assert "| lwkv from a store of 100 MB/s |  |  | 210 |  |  | 50.0 |" in alone
    assert len(both.splitlines()) == 5
    assert len(talks.splitlines()) == 4
    (alone,) = "\n".join(tables(load([other]))).strip().split("\n\n")[:1]
    assert alone.splitlines()[0] == "| | first cold prompt | start, s |"


def test_faults_are_printed_and_are_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write_result(tmp_path / "r.json", [finding("plain", 1.0)], ["one", "two"]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == ["fault: one", "fault: two"]
    assert json.loads((tmp_path / "r.json").read_text())["faults"] == ["one", "two"]


def test_what_is_written_has_no_more_digits_than_matter(result: Path) -> None:
    served = finding("lwkv", 25.125).served["beside"]
    found = json.loads(result.read_text())["findings"][1]["served"]["beside"]
    assert found == asdict(served)


def test_the_picture_has_every_engine_and_is_the_same_each_time(result: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "one.svg", tmp_path / "two.svg"
    for path in (first, second):
        draw(load([result]), path)
    text = first.read_text()
    assert text == second.read_text()
    for wanted in ("no cache", "lwkv", "25.1", "220", "decoded tokens a second"):
        assert f">{wanted}<" in text


@pytest.mark.parametrize("wrong", [{"schema": 1, "findings": []}, {"plain": {}}, []], ids=str)
def test_files_of_another_form_are_refused_by_name(wrong: Any, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(wrong))
    with pytest.raises(ConfigError, match=r"old\.json: not a result"):
        load([path])


def test_results_without_a_load_have_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw({"findings": []}, tmp_path / "none.svg")


def test_every_engine_has_a_name_for_readers() -> None:
    assert list(NAMES) == [mode for mode in NAMES if mode in MODES]
    assert set(NAMES) == set(MODES)
