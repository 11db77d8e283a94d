"""Drafts out of the prompt in a model with several groups of caches: what is rejected is never stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import vllm
from integrations.in_vllm import models
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import CHUNK, assert_same, prompt, started, with_lwkv

from lwkv.errors import ConfigError
from lwkv.integrations.vllm.hybrid.refusals import can_have_groups

pytestmark = pytest.mark.skipif(
    not can_have_groups(vllm.__version__), reason="before 0.32, vLLM has one group beside a connector"
)

# So many, so easily found, that nearly every step has some.
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers with a window of 64 and two without: three groups of two."""
    return models.written(models.write_gemma, tmp_path_factory.mktemp("gemma"), 64, "wwf" * 2)


@pytest.mark.parametrize("decodes_too", [False, True], ids=["prompts", "generated tokens too"])
def test_turns_of_conversations_with_drafts_out_of_the_prompt(gemma: Path, decodes_too: bool) -> None:
    computed = Elsewhere(gemma, enable_prefix_caching=False)
    # Elsewhere: numba, which this imports, keeps vLLM from starting a second time in a process.
    settings = with_lwkv(save_decode_cache=decodes_too)
    engine = Elsewhere(gemma, {}, speculative_config=NGRAM, enable_prefix_caching=True, **settings)
    try:
        turns = [2 * prompt(4400 + number, 60 + 40 * number) for number in range(3)]
        for _ in range(3):
            answers = engine.call("ask", turns, 50)
            assert_same(answers, computed.ask(turns, 50))
            ends = [len(turn) + (50 - 1) * decodes_too for turn in turns]
            turns = [
                turn + answer.tokens + prompt(len(turn), 30)
                for turn, answer in zip(turns, answers, strict=True)
            ]
            engine.call("forget")
        warm = engine.call("ask", turns, 50)
        assert_same(warm, computed.ask(turns, 50))
        # What the last step has computed of its drafts is not known when that is ordered to be stored.
        for answer, end in zip(warm, ends, strict=True):
            assert (end - 4) // CHUNK * CHUNK <= answer.cached <= end // CHUNK * CHUNK
        assert engine.call("metric", "vllm:spec_decode_num_draft_tokens") > 0
        engine.call("groups_at_rest")
    finally:
        engine.close()
        computed.close()


def test_a_draft_model_is_refused_by_name(gemma: Path, tmp_path: Path) -> None:
    llama, eagle = tmp_path / "llama", tmp_path / "eagle"
    for folder in (llama, eagle):
        folder.mkdir()
    models.written(models.write_llama, llama)
    models.written(models.write_eagle, eagle, llama)
    drafts = {"method": "eagle", "model": str(eagle), "num_speculative_tokens": 2}
    with (
        pytest.raises(ConfigError, match="'eagle', cannot be used"),
        started(gemma, speculative_config=drafts, **with_lwkv()),
    ):
        pass
