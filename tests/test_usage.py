"""The scripts of the documents do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lwkv.platforms import Platform

DOCS = Path(__file__).parents[1] / "docs"
SCRIPTS = [
    script
    for document in ("usage.md", "tiers.md")
    for script in re.findall(r"^```python\n(.*?)^```", (DOCS / document).read_text(), re.M | re.S)
]


def test_there_is_a_script_for_each_engine_and_for_a_tier() -> None:
    assert len(SCRIPTS) == 3


@pytest.mark.parametrize("script", SCRIPTS, ids=["vllm", "sglang", "tier"])
def test_a_script_of_the_documentation_runs(
    script: str, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LWKV_PLATFORM", platform.name)
    exec(compile(script, "docs", "exec"), {})
