"""`lwkv blend-demo`, with a tiny model."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from demo_model import write_model

from lwkv.cli.demo.blend.play import ANSWER, QUESTION, SHARES, documents
from lwkv.cli.main import main
from lwkv.platforms import Platform
from lwkv.reference import one_prompt, read_document

WAYS = ["full prefill", "plain reuse", "blend by deviation", "blend by query"]
Demo = Callable[..., int]


@pytest.fixture
def demo(tmp_path: Path, platform: Platform) -> Demo:
    model = write_model(tmp_path / "tiny", f"{read_document()} {QUESTION} # assistant system user")

    def run(*arguments: str) -> int:
        usual = ("--platform", platform.name, "--repeats", "2", "--output", str(tmp_path / "out"))
        return main(["blend-demo", "--model", str(model), *usual, *arguments])

    return run


def test_json_tells_what_each_way_computed_and_how_far_it_is_from_full_prefill(
    demo: Demo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo("--json", "--dtype", "float32") == 0
    shown, errors = capsys.readouterr()
    found = json.loads(shown)
    assert errors == ""
    assert found["faults"] == []
    assert (found["model"], found["dtype"], found["order"]) == ("tiny", "float32", [2, 0, 1])
    assert [way["name"] for way in found["ways"]] == WAYS
    full, reuse, *blends = found["ways"]
    always = found["num_prompt"] - found["num_reused"]
    assert (full["num_computed"], reuse["num_computed"]) == (found["num_prompt"], always)
    assert full["kl"] == 0
    assert all(way["first_token_s"] > 0 for way in found["ways"])
    for way in blends:
        assert way["num_computed"] == always + round(0.15 * found["num_reused"])
        assert way["share"] == pytest.approx(0.15, abs=1e-3)
    assert [curve["name"] for curve in found["curves"]] == ["deviation", "query", "prefix_k", "random"]
    for curve in found["curves"]:
        assert len(curve["kl"]) == len(SHARES)
        assert curve["kl"][0] == pytest.approx(reuse["kl"], rel=1e-4)
        assert curve["kl"][-1] == pytest.approx(0, abs=1e-2)
    assert found["files"] == [str(tmp_path / "out" / "blend.png")]
    assert Path(found["files"][0]).read_bytes().startswith(b"\x89PNG")


def test_the_report_says_it_in_words(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo() == 0
    shown = capsys.readouterr().out
    for wanted in (
        *WAYS,
        QUESTION,
        "documents 3, 1, 2",
        "KL to full",
        "blend.png",
        "prefix_k, the first of each document",
        "15%",
    ):
        assert wanted in shown
    assert "Fault" not in shown


def test_blends_that_differ_where_everything_is_computed_are_a_fault(
    demo: Demo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = one_prompt.forward
    monkeypatch.setattr(one_prompt, "forward", lambda *args: forward(*args) * torch.tensor(8.0))
    assert demo() == 1
    assert "Fault: deviation: with everything computed the answer is" in capsys.readouterr().out


def test_the_documents_are_the_whole_handbook_and_hold_the_answer() -> None:
    texts = documents()
    assert len(texts) == 3
    assert all(chapter.strip() in "\n\n".join(texts) for chapter in read_document().split("\n\n")[1:])
    assert sum(ANSWER in text for text in texts) == 1


def test_a_terminal_sees_a_bar_for_every_part(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", shown)
    assert demo("--json", "--dtype", "float32") == 0
    for part in ("starting", "Loading tiny", "Preparing the engine", "Full prefill, and caching", "Blending"):
        assert part in shown.getvalue()
