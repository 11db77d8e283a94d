"""A tier that is slower than computing costs no answer, and no time of requests that do not need it."""

from __future__ import annotations

from pathlib import Path

import pytest
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import CHUNK, assert_same, prompt, started, with_lwkv

from lwkv.benchmarks.throttled.remote import installed_in

CHUNK_GIB = 4 * 2 * CHUNK * 2 * 32 * 4 / 2**30
ROOM = 12
"""Chunks that host memory holds; the prompts have 40 in all."""


def test_what_a_slow_tier_has_is_computed_and_answers_are_the_same(
    llama: Path, plain: Elsewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_in(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    prompts = [prompt(700 + number, 5 * CHUNK + 9) for number in range(8)]
    settings = {
        "max_local_cpu_size": ROOM * CHUNK_GIB,
        "remote_url": "throttled://0.02",  # a chunk takes three seconds
        "load_timeout_s": 2,
        "extra_config": {"slab_bytes": int(ROOM * CHUNK_GIB * 2**30) // 4},
    }
    arguments = with_lwkv(**settings) | {"enable_prefix_caching": False, "max_num_batched_tokens": 512}
    with started(llama, **arguments) as engine:
        again = [prompts[-1]]
        for batch in (prompts, prompts, again):
            assert_same(engine.ask(batch), plain.ask(batch))
            # As many chunks as host memory holds may be on their way to the tier.
            assert engine.flush(timeout_s=120.0)
        engine.new_hits()
        assert_same(engine.ask(again), plain.ask(again))
        assert engine.new_hits() > 0, "what host memory has is loaded all the same"
        assert engine.metric("vllm:lwkv_prefetches_given_up") + engine.metric(
            "vllm:lwkv_requests_cheaper_to_compute"
        )
        engine.at_rest()
