"""The reference engine after a restart: its KV is on disk, and its answers are those of full recompute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lwkv.config.settings import Config
from lwkv.engine import CacheEngine
from lwkv.platforms import Platform
from lwkv.reference import Answer, Prompt, ReferenceEngine, generate, open_cache_engine
from lwkv.steps import LayerSteps
from lwkv.storage.disk.format import ALIGNMENT

MakeEngine = Callable[..., ReferenceEngine]
PROMPTS = [Prompt(list(range(first, first + count)), 5) for first, count in ((3, 16), (3, 27), (40, 9))]


def serve(
    make_engine: MakeEngine, platform: Platform, folder: Path, **settings: object
) -> tuple[list[Answer], dict[str, int]]:
    """Answer all prompts with a new engine over an empty paged cache, and give its numbers."""
    config = Config(
        chunk_size=8,
        use_layerwise=True,
        max_local_cpu_size=0.01,
        local_disk=str(folder),
        max_local_disk_size=0.1,
        **settings,
    )
    plain = make_engine()
    cache_engine: CacheEngine = open_cache_engine(config, plain.model, plain.cache, "tiny", platform=platform)
    with cache_engine:
        steps, lookup = LayerSteps(cache_engine), cache_engine.lookup
        answers = generate(make_engine(cache=plain.cache, steps=steps, lookup=lookup), PROMPTS)
        assert cache_engine.flush()
        return answers, cache_engine.stats()


@pytest.mark.parametrize("settings", [{}, {"local_cpu": False}, {"write_policy": "write_back"}], ids=str)
def test_answers_after_a_restart_rest_on_what_is_on_disk(
    make_engine: MakeEngine, platform: Platform, tmp_path: Path, settings: dict[str, object]
) -> None:
    plain = [answer.tokens for answer in generate(make_engine(), PROMPTS)]
    cold, _ = serve(make_engine, platform, tmp_path, **settings)
    warm, stats = serve(make_engine, platform, tmp_path, **settings)
    assert [answer.tokens for answer in cold] == [answer.tokens for answer in warm] == plain
    assert [answer.num_loaded for answer in warm] == [15, 24, 8]
    assert stats["tokens_retrieved"] == sum(answer.num_loaded for answer in warm)
    assert stats["disk_hits"] > 0


def test_answers_are_right_where_what_is_on_disk_went_bad(
    make_engine: MakeEngine, platform: Platform, tmp_path: Path
) -> None:
    plain = [answer.tokens for answer in generate(make_engine(), PROMPTS)]
    serve(make_engine, platform, tmp_path)
    for number, path in enumerate(sorted(tmp_path.glob("*.kv"))):
        data = bytearray(path.read_bytes())
        data[(1 + number % 3) * ALIGNMENT] ^= 255
        path.write_bytes(data)
    for _ in range(2):
        answers, stats = serve(make_engine, platform, tmp_path)
        assert [answer.tokens for answer in answers] == plain
    assert stats["tokens_retrieved"] == 47
    assert "disk_corrupt" not in stats
