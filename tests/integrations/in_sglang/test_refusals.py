"""Models that keep windows beside full attention's KV are refused at the start of a real SGLang, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from integrations.in_sglang.rig import Engine, with_lwkv
from integrations.in_vllm import models


def test_windows_are_refused_by_their_name(tmp_path: Path) -> None:
    """With an attention that SGLang takes for gpt-oss; it is refused before that computes anything."""
    model = models.written(models.write_gpt_oss, tmp_path, 64)
    with pytest.raises(AssertionError, match="this model keeps SWA beside full attention"):
        Engine(model, attention_backend="triton", **with_lwkv())
