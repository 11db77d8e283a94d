"""With the defaults: what is faster to compute is computed, and answers are the same either way."""

from __future__ import annotations

from pathlib import Path

from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import assert_same, prompt, started, with_lwkv


def test_answers_are_right_whatever_is_chosen_and_what_was_measured_is_shown(
    llama: Path, plain: Elsewhere
) -> None:
    prompts = [prompt(900 + number, 600) for number in range(3)]
    arguments = with_lwkv(load_when="cheaper")
    with started(llama, enable_prefix_caching=False, **arguments) as engine:
        for _ in range(3):
            assert_same(engine.ask(prompts), plain.ask(prompts))
        assert engine.scheduler.costs.gauges()["prefill_tokens_per_s", 0] > 0
        assert engine.metric("vllm:lwkv_prefill_tokens_per_s") > 0
        engine.at_rest()


def test_how_fast_a_new_disk_is_read_is_known_before_a_prompt_needs_it(
    llama: Path, plain: Elsewhere, tmp_path: Path
) -> None:
    prompts = [prompt(910 + number, 600) for number in range(3)]
    arguments = with_lwkv(load_when="cheaper", local_disk=str(tmp_path), max_local_disk_size=0.25)
    with started(llama, enable_prefix_caching=False, **arguments) as engine:
        assert_same(engine.ask(prompts), plain.ask(prompts))
        assert engine.flush()
        engine.ask([prompt(919, 20)])  # in its steps the scheduler hears of that
        assert engine.worker.engine.stats().get("disk_hits", 0) == 0
        assert engine.metric("vllm:lwkv_disk_chunks_per_s") > 0
        engine.at_rest()
