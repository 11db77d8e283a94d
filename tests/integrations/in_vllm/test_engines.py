"""The same through other kinds of engines and models: more processes, windows, drafts, fp8, graphs, MLA."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.in_vllm import models
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import Answer, assert_same, prompt, started, with_lwkv

PROMPTS = [prompt(600, 300), prompt(600, 128) + prompt(601, 200), prompt(602, 90)]
OTHERS = [*PROMPTS, prompt(602, 80) + prompt(603, 300)]


def run_through(engine: Any, wanted: Sequence[Answer], hits: int = 256 + 320 + 64 + 64) -> None:
    """Ask cold, then warm together with one more prompt that hits in part, both without vLLM's own cache."""
    assert_same(engine.ask(PROMPTS), wanted[:3])
    engine.forget()
    engine.new_hits()
    assert_same(engine.ask(OTHERS), wanted)
    assert engine.new_hits() == hits
    assert engine.metric("vllm:lwkv_tokens_recomputed") == 0


class Calling:
    """An engine elsewhere, with the methods of one that is here."""

    def __init__(self, engine: Elsewhere) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._engine.call(name, *arguments)


def run_elsewhere(
    model: Path, wanted: Sequence[Answer], environment: dict[str, str], **arguments: Any
) -> None:
    """As `run_through`, for an engine that needs another environment or brings processes of its own."""
    engine = Elsewhere(model, environment, enable_prefix_caching=False, **arguments, **with_lwkv())
    try:
        run_through(Calling(engine), wanted)
    finally:
        engine.close()


def test_two_ranks_of_tensor_parallel(llama: Path, plain: Elsewhere) -> None:
    mp = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
    run_elsewhere(llama, plain.ask(OTHERS), {}, **mp)


def test_the_engine_in_processes_of_its_own_as_vllm_does_by_default(llama: Path, plain: Elsewhere) -> None:
    many = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    run_elsewhere(llama, plain.ask(OTHERS), many, distributed_executor_backend="mp")


def test_a_model_that_is_compiled(llama: Path, plain: Elsewhere) -> None:
    run_elsewhere(llama, plain.ask(OTHERS), {"TORCHDYNAMO_DISABLE": "0"}, enforce_eager=False)


def test_drafts_out_of_the_prompt_that_are_mostly_rejected(llama: Path, plain: Elsewhere) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    # Elsewhere: numba, which this imports, keeps vLLM from starting a second time in a process.
    run_elsewhere(llama, plain.ask(OTHERS), {}, speculative_config=drafts)


def test_drafts_of_a_model_whose_layers_are_cached_too(llama: Path, plain: Elsewhere, tmp_path: Path) -> None:
    eagle = models.written(models.write_eagle, tmp_path, llama)
    drafts = {"method": "eagle", "model": str(eagle), "num_speculative_tokens": 2}
    run_elsewhere(llama, plain.ask(OTHERS), {}, speculative_config=drafts)


@pytest.mark.parametrize("steps", ["whole", "in parts"])
def test_a_model_with_a_sliding_window(tmp_path: Path, steps: str) -> None:
    model = models.written(models.write_mistral, tmp_path, 100)
    parts = {} if steps == "whole" else {"max_num_batched_tokens": 100, "max_num_seqs": 4}
    other = Elsewhere(model, enable_prefix_caching=False)
    try:
        with started(model, enable_prefix_caching=True, **parts, **with_lwkv()) as engine:
            # One block of the last prompt comes from vLLM's own cache: another prompt of the batch has it.
            run_through(engine, other.ask(OTHERS), 256 + 320 + 64)
            engine.at_rest()
    finally:
        other.close()


def test_a_model_of_which_some_layers_have_a_window_in_one_group(tmp_path: Path) -> None:
    model = models.written(models.write_gemma, tmp_path, 64)
    other = Elsewhere(model, enable_prefix_caching=False)
    arguments = {"enable_prefix_caching": False, "disable_hybrid_kv_cache_manager": True}
    try:
        with started(model, **arguments, **with_lwkv()) as engine:
            run_through(engine, other.ask(OTHERS))
            engine.at_rest()
    finally:
        other.close()


@pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM refuses caches of eight bits on a processor without AVX-512 and AMX",
)
def test_a_cache_of_eight_bits(llama: Path) -> None:
    # Its rounding makes answers depend on how batches are cut; cold and warm are cut alike here.
    arguments = {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "enable_prefix_caching": False}
    with started(llama, **arguments, **with_lwkv()) as engine:
        ids = prompt(610, 320)
        cold = engine.ask([ids[:256]]) and engine.ask([ids])
        engine.new_hits()
        warm = engine.ask([ids])
        assert engine.new_hits() == 288
        assert [answer.tokens[0] for answer in warm] == [answer.tokens[0] for answer in cold]


def test_latent_rows_instead_of_keys_and_values(tmp_path: Path) -> None:
    model = models.written(models.write_deepseek, tmp_path)
    # In eager mode vLLM for the CPU computes MLA wrongly with its own operations.
    arguments = {"block_size": 16, "compilation_config": {"custom_ops": ["none"]}}
    other = Elsewhere(model, enable_prefix_caching=False, **arguments)
    try:
        with started(model, enable_prefix_caching=False, **arguments, **with_lwkv()) as engine:
            run_through(engine, other.ask(OTHERS))
            engine.at_rest()
    finally:
        other.close()
