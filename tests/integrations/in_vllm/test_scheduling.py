"""Steps that hold a part of a prompt, requests that lose their blocks, and one direction alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import Engine, assert_same, prompt, started, with_lwkv


def ask_twice(engine: Engine, plain: Elsewhere, prompts: list[list[int]], max_tokens: int = 8) -> int:
    """Ask, empty vLLM's own cache, ask again, compare; the hits of the second time."""
    assert_same(engine.ask(prompts, max_tokens), plain.ask(prompts, max_tokens))
    engine.forget()
    engine.new_hits()
    assert_same(engine.ask(prompts, max_tokens), plain.ask(prompts, max_tokens))
    engine.at_rest()
    return engine.new_hits()


@pytest.mark.parametrize("own_cache", [False, True])
@pytest.mark.parametrize("chunk_size", [32, 96, 256])
def test_prompts_that_are_computed_100_tokens_a_step(
    llama: Path, plain: Elsewhere, own_cache: bool, chunk_size: int
) -> None:
    arguments = {"max_num_batched_tokens": 100, "max_num_seqs": 4, "enable_prefix_caching": own_cache}
    with started(llama, **arguments, **with_lwkv(chunk_size=chunk_size)) as engine:
        prompts = [prompt(200 + i, 250 + 150 * i) for i in range(3)]
        wanted = sum(len(ids) // chunk_size * chunk_size for ids in prompts)
        assert ask_twice(engine, plain, prompts) == wanted
        # A hit in front of a part that takes several steps.
        longer = [prompts[0] + prompt(210, 300)]
        assert_same(engine.ask(longer), plain.ask(longer))


@pytest.mark.parametrize("own_cache", [False, True])
def test_requests_that_are_preempted(llama: Path, plain: Elsewhere, own_cache: bool) -> None:
    arguments = {
        "num_gpu_blocks_override": 30,
        "max_model_len": 640,
        "enable_prefix_caching": own_cache,
    }
    with started(llama, **arguments, **with_lwkv()) as engine:
        prompts = [prompt(220 + i, 190 + 20 * i) for i in range(4)]
        assert ask_twice(engine, plain, prompts, 100) == 128 + 3 * 192
        assert engine.metric("vllm:num_preemptions") > 0


@pytest.mark.parametrize(
    ("settings", "hits"),
    [
        ({}, 192),
        ({"save_decode_cache": True}, 256),
        ({"save_unfull_chunk": True}, 192),
        ({"use_layerwise": False}, 192),
    ],
    ids=["prompts", "decoded tokens too", "the rest of a prompt too", "in bulk"],
)
def test_what_is_stored_of_a_prompt_of_200_and_an_answer_of_57(
    llama: Path, plain: Elsewhere, settings: dict[str, Any], hits: int
) -> None:
    """The last token of all is sampled and not computed: the 256 before it are four chunks."""
    with started(llama, enable_prefix_caching=False, **with_lwkv(**settings)) as engine:
        ids = prompt(240, 200)
        (answer,) = engine.ask([ids], 57)
        engine.run_out()
        turn = [ids + answer.tokens + prompt(241, 30)]
        engine.new_hits()
        assert_same(engine.ask(turn), plain.ask(turn))
        assert engine.new_hits() == hits
        engine.at_rest()


def test_the_rest_of_a_prompt_that_fills_no_chunk_is_found_again_for_the_same_prompt(
    llama: Path, plain: Elsewhere
) -> None:
    with started(llama, enable_prefix_caching=False, **with_lwkv(save_unfull_chunk=True)) as engine:
        assert ask_twice(engine, plain, [prompt(245, 240)]) == 224


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_producer_loads_nothing_and_a_consumer_stores_nothing(
    llama: Path, plain: Elsewhere, role: str, tmp_path: Path
) -> None:
    disk = {"local_disk": str(tmp_path), "max_local_disk_size": 0.25}
    with started(llama, enable_prefix_caching=False, **with_lwkv(role, **disk)) as engine:
        assert ask_twice(engine, plain, [prompt(250, 200)]) == 0
        assert engine.worker.engine.stats()["chunks"] == (3 if role == "kv_producer" else 0)


def test_prompt_log_probabilities_are_those_of_a_prompt_that_is_computed(llama: Path) -> None:
    from vllm import SamplingParams

    with started(llama, enable_prefix_caching=False, **with_lwkv()) as engine:
        ids = {"prompt_token_ids": prompt(260, 200)}
        parameters = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, detokenize=False)
        outputs = [engine.llm.generate([ids], parameters, use_tqdm=False)[0] for _ in range(2)]
        assert [len(output.prompt_logprobs) for output in outputs] == [200, 200]
        assert engine.new_hits() == 0
