"""`lwkv demo --tier`: a second process answers from what the first one left in a tier."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from demo_model import write_model
from storage.servers import Server

from lwkv.cli.demo import command
from lwkv.cli.demo.restart import FirstRun, Restart, Served, restart_faults
from lwkv.cli.demo.restart_report import restart_lines
from lwkv.cli.main import main
from lwkv.platforms import Platform
from lwkv.reference import QUESTIONS, document_prompt

Demo = Callable[..., int]
STORED = FirstRun([1], [5, 6], 2.0, 768, 800, ["one", "two"])
SERVED = Served([5, 6], 1.0, 768, 768, "disk", 768, {"disk_get_bytes": 1 << 20})


@pytest.fixture
def demo(platform: Platform, tmp_path: Path) -> Demo:
    """Runs `lwkv demo` over a restart with a tiny model."""
    text = " ".join(document_prompt(question) for question in QUESTIONS)
    model = write_model(tmp_path / "tiny", text)

    def run(*arguments: object) -> int:
        fixed = ["--platform", platform.name, "--model", model, "--output", tmp_path / "out"]
        return main(["demo", *(str(argument) for argument in (*fixed, *arguments))])

    return run


def require_served_by(tier: str, code: int, shown: str) -> None:
    found = json.loads(shown)
    assert (code, found["faults"]) == (0, [])
    served, stored = found["served"], found["stored"]
    assert served["tokens"] == stored["recomputed"]
    assert served["num_from_tier"] == served["num_retrieved"] == stored["num_stored"] == 768
    assert served["tier"] == tier
    assert served["stats"][f"{tier}_get_bytes"] > 0


def test_a_second_process_answers_from_the_disk(
    demo: Demo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "out" / "tier" / "somebody-else-s"
    kept.parent.mkdir(parents=True)
    kept.write_text("kept")
    code = demo("--tier", "disk", "--json")
    require_served_by("disk", code, capsys.readouterr().out)
    assert list(kept.parent.iterdir()) == [kept]


def test_a_second_process_answers_from_a_server(
    demo: Demo, redis: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    code = demo("--tier", f"redis://127.0.0.1:{redis.port}", "--json")
    shown = capsys.readouterr().out
    require_served_by("valkey", code, shown)
    found = json.loads(shown)
    stored = FirstRun(**found["stored"])
    report = "\n".join(
        restart_lines(Restart(**found | {"stored": stored, "served": Served(**found["served"])}))
    )
    assert len(stored.hashes) >= 3
    assert all(name in report for name in (*stored.hashes, "valkey-cli unlink"))


def test_the_report_says_it_in_words(
    demo: Demo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[Any] = []

    def found(*arguments: object) -> Restart:
        asked.append(arguments[-1])
        return Restart("file:///there", list(QUESTIONS), STORED, SERVED, [])

    monkeypatch.setattr(command, "restart", found)
    assert demo("--tier", tmp_path / "there") == 0
    (asked_for,) = asked
    assert asked_for["max_local_disk_size"] == 1.0
    assert Path(asked_for["local_disk"]).parent == tmp_path / "there"
    assert not (tmp_path / "there").exists()
    shown = capsys.readouterr().out
    told = ("768 of 800 tokens hit", "768 of them served from the tier 'disk'", "equals full recompute")
    assert all(wanted in shown for wanted in (*QUESTIONS, *told))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"tokens": [5, 7]}, "the tokens are [5, 7], by full recompute [5, 6]"),
        ({"num_from_tier": 512}, "768 tokens were found, 768 retrieved, and 512 of them came from the tier"),
        ({"num_hit": 0, "num_retrieved": 0, "num_from_tier": 0}, "0 tokens were found"),
    ],
)
def test_what_must_be_and_is_not_is_a_fault(change: dict[str, object], fault: str) -> None:
    served = replace(SERVED, **change)
    faults = list(restart_faults(STORED, served))
    assert len(faults) == 1
    assert fault in faults[0]
    assert faults[0] in "\n".join(restart_lines(Restart("tier", list(QUESTIONS), STORED, served, faults)))


@pytest.mark.parametrize(
    ("tier", "told"),
    [("/proc/cache", "cannot write to /proc/cache"), ("nosuch://host:1", "no tier for nosuch://")],
)
def test_a_tier_that_cannot_be_is_one_line(
    demo: Demo, tier: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo("--tier", tier) == 2
    assert told in capsys.readouterr().err
