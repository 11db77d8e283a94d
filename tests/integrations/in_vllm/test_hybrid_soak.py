"""Random prompts in little memory of both kinds: models with windows answer as they do without lwkv.

40 prompts of each model run with the other tests; `--soak MINUTES` asks 80 for each minute, and prints what
was found.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from integrations.in_vllm import models
from integrations.in_vllm.hybrid_soak import Prompts, Watched, at_rest
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import Engine, assert_same, started, with_lwkv

from lwkv.integrations.vllm.hybrid.refusals import can_have_groups

pytestmark = pytest.mark.skipif(
    not can_have_groups(vllm.__version__), reason="before 0.32, vLLM has all layers in one group here"
)

PROMPTS_A_MINUTE = 80
MODELS: dict[str, tuple[Any, ...]] = {
    "gemma 3": (models.write_gemma, 64, "wwf" * 2),
    "gpt-oss": (models.write_gpt_oss, 128),
    "llama 4": (models.write_llama4, 128),
}
BLOCKS = {"gemma 3": 56, "gpt-oss": 56, "llama 4": 42}
"""Of vLLM's: so few that requests wait for them, and lose them."""
STEP_BY_STEP = "gemma 3"
"""With `--no-async-scheduling`: no step is scheduled before the result of the one before has come."""
ROOM_GIB = 5 * 2**20 / 2**30
"""160 pages, each of a chunk in one layer."""
SMALL = {
    "max_local_cpu_size": ROOM_GIB,
    "extra_config": {"slab_bytes": 1 << 20},
    "save_decode_cache": True,
}
TIGHT = {
    "max_model_len": 704,
    "max_num_batched_tokens": 200,
    "max_num_seqs": 4,
}


@pytest.fixture(scope="module", autouse=True)
def _local_attention_has_groups() -> Iterator[None]:
    """Without this, vLLM has all layers of Llama 4 in one group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "1")
        yield


@pytest.mark.parametrize("name", MODELS)
def test_random_prompts_in_little_memory_are_answered_as_without_lwkv(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    write, *shape = MODELS[name]
    model = models.written(write, tmp_path, *shape)
    most = PROMPTS_A_MINUTE * float(request.config.getoption("--soak"))
    computed = Elsewhere(model, enable_prefix_caching=False)
    try:
        blocks, ahead = BLOCKS[name], name != STEP_BY_STEP
        arguments = {"num_gpu_blocks_override": blocks, "async_scheduling": ahead, **TIGHT}
        with started(model, **arguments, **with_lwkv(**SMALL)) as engine:
            watched = Watched(engine)
            asked, tokens, cached = go(engine, computed, most, random.Random(name))
            at_rest(engine, watched)
            stats = engine.worker.engine.stats()
            preempted = engine.metric("vllm:num_preemptions")
            loaded = int(engine.metric("vllm:external_prefix_cache_hits"))
    finally:
        computed.close()
    print(
        f"\n{name}: {asked} prompts of {tokens} tokens, {cached} not computed, {loaded} of them loaded; "
        f"{dict(watched.seen)}, {preempted:.0f} preemptions, {stats['chunks_evicted']} chunks evicted"
    )
    assert watched.seen["loaded"] > 0
    assert loaded > 0
    assert preempted > 0
    assert stats["chunks_evicted"] > 0
    assert watched.seen["promised and not allocated at once"] > 0


def go(engine: Engine, computed: Elsewhere, most: float, chance: random.Random) -> tuple[int, int, int]:
    """Ask prompts, compare; now and then vLLM forgets its own. How many, of how many tokens, not computed."""
    prompts, asked, tokens, cached = Prompts(1), 0, 0, 0
    while asked < most:
        batch, length = prompts.next_batch(), chance.choice([4, 40])
        answers = engine.ask(batch, length)
        assert_same(answers, computed.ask(batch, length))
        asked, tokens = asked + len(batch), tokens + sum(map(len, batch))
        cached += sum(answer.cached for answer in answers)
        if chance.random() < 0.5:
            engine.forget()
    return asked, tokens, cached
