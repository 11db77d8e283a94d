"""Blending with other models than Llama: those that it works with, and those that it is refused for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from integrations.in_vllm import models
from integrations.in_vllm.rig import assert_same, prompt, started
from integrations.in_vllm.test_blending import Documents, ask, blending, count, documents, encode

from lwkv.errors import ConfigError


@pytest.mark.parametrize(
    "write",
    [models.write_qwen2, models.write_qwen3, models.write_qwen3_moe],
    ids=lambda write: write.__name__,
)
def test_a_blend_that_computes_all_tokens_again_gives_its_own_answer(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = models.written(write, tmp_path)
    with started(folder, **blending(blend_recompute_ratios=1.0)) as engine:
        parts = documents(1, 100, 150, 77)
        encode(engine, parts)
        asked = Documents([parts[2], parts[0], parts[1]], prompt(6, 33))
        answers = ask(engine, [asked])
        assert count(engine, "requests") == 1
        engine.forget()
        engine.evict_all()
        assert_same(answers, engine.ask([asked.ids]))


def test_a_model_whose_layers_have_another_form_is_refused(tmp_path: Path) -> None:
    """Gemma's embeddings are scaled before the first layer."""
    folder = models.written(models.write_gemma, tmp_path, 4096)
    with (
        pytest.raises(ConfigError, match=r"cannot be blended|look at all tokens|keeps a SlidingWindow"),
        started(folder, **blending()),
    ):
        pass
