"""Models with several groups of caches: prompts in parts, requests that lose their blocks, settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from integrations.in_vllm import models
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import Engine, assert_same, prompt, started, with_lwkv

from lwkv.errors import ConfigError
from lwkv.integrations.vllm.hybrid.refusals import can_have_groups

pytestmark = pytest.mark.skipif(
    not can_have_groups(vllm.__version__), reason="before 0.32, vLLM has all layers in one group here"
)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers with a window of 64 and two without: three groups of two."""
    return models.written(models.write_gemma, tmp_path_factory.mktemp("gemma"), 64, "wwf" * 2)


@pytest.fixture(scope="module")
def computed(gemma: Path) -> Iterator[Elsewhere]:
    engine = Elsewhere(gemma, enable_prefix_caching=False)
    yield engine
    engine.close()


@pytest.mark.parametrize("own_cache", [False, True])
@pytest.mark.parametrize("chunk_size", [32, 96, 256])
def test_prompts_that_are_computed_100_tokens_a_step(
    gemma: Path, computed: Elsewhere, own_cache: bool, chunk_size: int
) -> None:
    arguments = {"max_num_batched_tokens": 100, "max_num_seqs": 4, "enable_prefix_caching": own_cache}
    with started(gemma, **arguments, **with_lwkv(chunk_size=chunk_size)) as engine:
        prompts = [prompt(2200 + i, 250 + 150 * i) for i in range(3)]
        wanted = sum((len(ids) - 1) // chunk_size * chunk_size for ids in prompts)
        assert ask_twice(engine, computed, prompts) == wanted
        longer = [prompts[0] + prompt(2210, 300)]
        assert_same(engine.ask(longer), computed.ask(longer))


@pytest.mark.parametrize("own_cache", [False, True])
def test_requests_that_are_preempted(gemma: Path, computed: Elsewhere, own_cache: bool) -> None:
    arguments = {"num_gpu_blocks_override": 42, "max_model_len": 384, "enable_prefix_caching": own_cache}
    with started(gemma, **arguments, **with_lwkv()) as engine:
        prompts = [prompt(2220 + i, 190 + 20 * i) for i in range(4)]
        assert ask_twice(engine, computed, prompts, 100) > 0
        assert engine.metric("vllm:num_preemptions") > 0


@pytest.mark.parametrize(
    "settings", [{"save_decode_cache": True}, {"use_layerwise": False}], ids=["decoded tokens too", "in bulk"]
)
def test_settings_that_change_what_is_moved_and_when(
    gemma: Path, computed: Elsewhere, settings: dict[str, Any]
) -> None:
    with started(gemma, enable_prefix_caching=False, **with_lwkv(**settings)) as engine:
        ids = prompt(2240, 200)
        (answer,) = engine.ask([ids], 80)
        turn = [ids + answer.tokens + prompt(2241, 30)]
        engine.new_hits()
        assert_same(engine.ask(turn), computed.ask(turn))
        assert engine.new_hits() == (256 if "save_decode_cache" in settings else 192)
        engine.groups_at_rest()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"save_unfull_chunk": True}, "save_unfull_chunk"),
        ({"host_memory": "/tmp/lwkv-none.socket"}, "host_memory"),
    ],
)
def test_settings_that_cannot_be_used_with_several_groups_are_refused_by_name(
    gemma: Path, settings: dict[str, Any], named: str
) -> None:
    with (
        pytest.raises(
            ConfigError, match=rf"(?s){named}: got .*; set it to .*--disable-hybrid-kv-cache-manager"
        ),
        started(gemma, **with_lwkv(**settings)),
    ):
        pass


def test_one_group_serves_the_same_model_if_that_is_what_the_user_wants(
    gemma: Path, computed: Elsewhere
) -> None:
    arguments = {"disable_hybrid_kv_cache_manager": True, "enable_prefix_caching": False}
    with started(gemma, **arguments, **with_lwkv()) as engine:
        assert ask_twice(engine, computed, [prompt(2260, 300)]) == 256


def test_two_ranks_load_only_what_both_have(gemma: Path, computed: Elsewhere) -> None:
    ranks = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
    engine = Elsewhere(gemma, {}, enable_prefix_caching=False, **ranks, **with_lwkv())
    try:
        prompts = [prompt(2300, 300), prompt(2301, 200)]
        assert_same(engine.call("ask", prompts), computed.ask(prompts))
        longer = [ids + prompt(2302, 40) for ids in prompts]
        answers = engine.call("ask", longer)
        assert_same(answers, computed.ask(longer))
        assert [answer.cached for answer in answers] == [256, 192]
    finally:
        engine.close()


def ask_twice(engine: Engine, computed: Elsewhere, prompts: list[list[int]], max_tokens: int = 8) -> int:
    """Ask, empty vLLM's own cache, ask again, compare; the hits of the second time."""
    assert_same(engine.ask(prompts, max_tokens), computed.ask(prompts, max_tokens))
    engine.forget()
    engine.new_hits()
    assert_same(engine.ask(prompts, max_tokens), computed.ask(prompts, max_tokens))
    return engine.new_hits()
