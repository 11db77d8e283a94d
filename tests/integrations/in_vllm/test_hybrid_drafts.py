"""Speculative decoding of models with several groups of caches: nothing is stored of what is rejected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from integrations.in_vllm import models
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import BLOCK, CHUNK, assert_same, prompt, started, with_lwkv

from lwkv.integrations.vllm.hybrid.refusals import can_have_groups

pytestmark = pytest.mark.skipif(
    not can_have_groups(vllm.__version__), reason="before 0.32, vLLM has one group beside a connector"
)

# So many, so easily found, that nearly every step has some.
DRAFTS = "num_speculative_tokens"
NGRAM = {"method": "ngram", DRAFTS: 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
TOKENS = 50


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers with a window of 64 and two without: three groups of two."""
    return models.written(models.write_gemma, tmp_path_factory.mktemp("gemma"), 64, "wwf" * 2)


@pytest.fixture(scope="module")
def computed(gemma: Path) -> Iterator[Elsewhere]:
    engine = Elsewhere(gemma, enable_prefix_caching=False)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer of full attention: vLLM has it in one group with those of the model."""
    llama = models.written(models.write_llama, tmp_path_factory.mktemp("llama"))
    return models.written(models.write_eagle, tmp_path_factory.mktemp("eagle"), llama)


@pytest.mark.parametrize("method", ["ngram", "eagle"])
@pytest.mark.parametrize("decodes_too", [False, True], ids=["prompts", "generated tokens too"])
def test_turns_of_conversations(
    gemma: Path, computed: Elsewhere, eagle: Path, method: str, decodes_too: bool
) -> None:
    drafts = NGRAM if method == "ngram" else {"method": "eagle", "model": str(eagle)} | {DRAFTS: 2}
    # Elsewhere: numba, which ngram imports, keeps vLLM from starting a second time in a process.
    settings = with_lwkv(save_decode_cache=decodes_too)
    engine = Elsewhere(gemma, {}, speculative_config=drafts, enable_prefix_caching=True, **settings)
    try:
        turns = [2 * prompt(4400 + number, 60 + 40 * number) for number in range(3)]
        for _ in range(3):
            answers = engine.call("ask", turns, TOKENS)
            assert_same(answers, computed.ask(turns, TOKENS))
            ends = [len(turn) + (TOKENS - 1) * decodes_too for turn in turns]
            pairs = zip(turns, answers, strict=True)
            turns = [turn + answer.tokens + prompt(len(turn), 30) for turn, answer in pairs]
            engine.call("forget")
        warm = engine.call("ask", turns, TOKENS)
        assert_same(warm, computed.ask(turns, TOKENS))
        # What the last steps have computed of their drafts is not known when they are ordered to be stored.
        for answer, end in zip(warm, ends, strict=True):
            assert (end - 2 * drafts[DRAFTS]) // CHUNK * CHUNK <= answer.cached <= end // CHUNK * CHUNK
        assert engine.call("metric", "vllm:spec_decode_num_draft_tokens") > 0
        engine.call("groups_at_rest")
    finally:
        engine.close()


def test_what_a_draft_model_keeps_is_loaded_as_it_was_computed(
    gemma: Path, computed: Elsewhere, eagle: Path
) -> None:
    """Byte for byte: what it drafts does not show it, since the model checks that."""
    drafts = {"method": "eagle", "model": str(eagle), DRAFTS: 2}
    ids = prompt(4500, 300)
    with started(gemma, speculative_config=drafts, enable_prefix_caching=True, **with_lwkv()) as engine:
        found = []
        for hits in (0, 256):
            engine.begin("a", ids)
            (request,) = engine.core.scheduler.requests.values()
            while not request.output_token_ids:
                engine.llm.llm_engine.step()
            tables = engine.core.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            blocks = list(tables[1][: 256 // BLOCK])
            caches = engine.worker.engine.groups[1].caches
            names = [*caches]
            assert names[-1].startswith("model.layers.6.")
            found.append({name: halves(caches[name], blocks) for name in names})
            assert_same([engine.step_until("a")["a"]], computed.ask([ids]))
            assert engine.new_hits() == hits
            engine.forget()
        cold, warm = found
        for name in cold:
            assert torch.equal(cold[name], warm[name]), name
        engine.groups_at_rest()


def halves(cache: Any, blocks: list[int]) -> torch.Tensor:
    """All that is in these blocks of a layer, K and V."""
    parts = cache if isinstance(cache, tuple | list) else [cache]
    return torch.cat([part[blocks].flatten() for part in parts]).clone()
