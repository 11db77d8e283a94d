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
