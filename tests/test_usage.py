"""The scripts of the documents do what they say."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from demo_model import needs_smollm2

from lwkv.config.settings import Config
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
    script, _ = scripts_of("docs/blending.md")
    monkeypatch.setenv("LWKV_PLATFORM", "cpu")  # the script's caches are in host memory
    exec(compile(script, "blending.md", "exec"), {})
    assert re.match(r"\d\d+ of \d+ tokens reused, \d+ of them", capsys.readouterr().out)


class Completions:
    """As OpenAI's client has them; answers nothing."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def create(self, model: str, messages: list[dict[str, str]]) -> SimpleNamespace:
        (message,) = messages
        self.asked.append(message["content"])
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="yes"))])


def test_the_client_about_blending_sends_its_documents_in_two_orders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, script = scripts_of("docs/blending.md")
    completions = Completions()
    client = SimpleNamespace(
        models=SimpleNamespace(list=lambda: SimpleNamespace(data=[SimpleNamespace(id="a model")])),
        chat=SimpleNamespace(completions=completions),
    )
    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(OpenAI=lambda **_: client))
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second", "third"):
        (tmp_path / f"{name}.txt").write_text(f"The {name} document.")
    exec(compile(script, "blending.md", "exec"), {})
    separator = Config.model_fields["blend_special_str"].default
    one, other = (asked.split(separator)[1:-1] for asked in completions.asked)
    assert one == [f"The {name} document." for name in ("first", "second", "third")]
    assert other == [one[2], one[0], one[1]]


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
