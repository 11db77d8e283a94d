"""Models that keep more than full attention's KV are refused at the start of a real SGLang, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from integrations.in_sglang.rig import Engine, with_lwkv
from integrations.in_vllm import models


@pytest.mark.parametrize(
    ("write", "arguments", "component"),
    [(models.write_gpt_oss, (64,), "SWA"), (models.write_lfm2, (), "MAMBA")],
    ids=["gpt-oss", "LFM2"],
)
def test_windows_and_states_are_refused_by_their_names(
    write: Callable[..., Path], arguments: tuple[Any, ...], component: str, tmp_path: Path
) -> None:
    model = models.written(write, tmp_path, *arguments)
    with pytest.raises(AssertionError, match=f"this model keeps {component} beside full attention"):
        Engine(model, **with_lwkv())
