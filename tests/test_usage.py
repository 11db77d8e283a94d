"""The scripts of the documents do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from demo_model import needs_smollm2

from lwkv.platforms import Platform

DOCS = Path(__file__).parents[1] / "docs"
SCRIPTS = [
    script
    for document in ("usage.md", "tiers.md")
    for script in re.findall(r"^```python\n(.*?)^```", (DOCS / document).read_text(), re.M | re.S)
]


def test_there_is_a_script_for_each_engine_and_for_a_tier() -> None:
    assert len(SCRIPTS) == 3


@needs_smollm2
def test_the_script_about_blending_reuses_its_documents(
    platform: Platform, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```", (DOCS / "blending.md").read_text(), re.M | re.S)
    monkeypatch.setenv("LWKV_PLATFORM", "cpu")  # the script's caches are in host memory
    exec(compile(script, "blending.md", "exec"), {})
    assert re.match(r"\d\d+ of \d+ tokens reused, \d+ of them", capsys.readouterr().out)


@pytest.mark.parametrize("script", SCRIPTS, ids=["vllm", "sglang", "tier"])
def test_a_script_of_the_documentation_runs(
    script: str, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LWKV_PLATFORM", platform.name)
    exec(compile(script, "docs", "exec"), {})


@pytest.mark.parametrize("script", SCRIPTS, ids=["vllm", "sglang", "tier"])
def test_a_script_of_the_documentation_runs_in_inference_mode(
    script: str, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As engines do: the threads of tiers are not in it."""
    monkeypatch.setenv("LWKV_PLATFORM", platform.name)
    with torch.inference_mode():
        exec(compile(script, "docs", "exec"), {})
