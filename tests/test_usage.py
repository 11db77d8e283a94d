"""The scripts of docs/usage.md do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lwkv.platforms import Platform

SCRIPTS = re.findall(
    r"^```python\n(.*?)^```", (Path(__file__).parents[1] / "docs" / "usage.md").read_text(), re.M | re.S
)


def test_there_is_a_script_for_each_engine() -> None:
    assert len(SCRIPTS) == 2


@pytest.mark.parametrize("script", SCRIPTS, ids=["vllm", "sglang"])
def test_a_script_of_the_documentation_runs(
    script: str, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LWKV_PLATFORM", platform.name)
    exec(compile(script, "docs/usage.md", "exec"), {})
