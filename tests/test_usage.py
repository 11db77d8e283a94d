"""The scripts of the documents do what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_model import needs_smollm2

from lwkv.platforms import Platform

TREE = Path(__file__).parents[1]


def scripts_of(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (TREE / document).read_text(), re.M | re.S)


SCRIPTS = [*scripts_of("README.md"), *scripts_of("docs/usage.md"), *scripts_of("docs/tiers.md")]
NAMES = ["readme", "vllm", "engine", "sglang", "timeline", "tier"]


def test_there_is_a_script_for_each_use() -> None:
    assert len(SCRIPTS) == len(NAMES)


@needs_smollm2
def test_the_script_about_blending_reuses_its_documents(
    platform: Platform, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (script,) = scripts_of("docs/blending.md")
    monkeypatch.setenv("LWKV_PLATFORM", "cpu")  # the script's caches are in host memory
    exec(compile(script, "blending.md", "exec"), {})
    assert re.match(r"\d\d+ of \d+ tokens reused, \d+ of them", capsys.readouterr().out)


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_a_script_of_the_documentation_runs(
    script: str, platform: Platform, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # where scripts write their files
    monkeypatch.setenv("LWKV_PLATFORM", platform.name)
    exec(compile(script, "docs", "exec"), {})


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_complete_engine_uses_nothing_of_a_step_whose_load_failed(
    failing: int, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LWKV_PLATFORM", platform.name)
    names: dict[str, Any] = {}
    exec(compile(SCRIPTS[NAMES.index("engine")], "docs", "exec"), names)
    engine, prompt = names["Engine"](), names["prompt"]
    expected = engine.prefill(prompt, torch.arange(80))
    engine.cache.flush()
    loader = engine.cache.connector.loader
    load_layer = loader.load_layer

    def fail(load: Any, layer: int, *rest: Any) -> None:
        if layer == failing:
            raise RuntimeError("the device is gone")
        load_layer(load, layer, *rest)

    monkeypatch.setattr(loader, "load_layer", fail)
    again = engine.prefill(prompt, torch.arange(512, 592))
    assert engine.promised == 0  # of the second try
    torch.testing.assert_close(again, expected)
    monkeypatch.undo()
    assert engine.cache.lookup(prompt) == 64
    engine.cache.close()


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_a_script_of_the_documentation_runs_in_inference_mode(
    script: str, platform: Platform, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As engines do: the threads of tiers are not in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LWKV_PLATFORM", platform.name)
    with torch.inference_mode():
        exec(compile(script, "docs", "exec"), {})
