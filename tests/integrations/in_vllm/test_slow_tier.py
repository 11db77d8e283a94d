"""A tier that is slower than computing costs no answer, and no time of requests that do not need it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import CHUNK, assert_same, prompt, started, with_lwkv

from lwkv.benchmarks.throttled import remote
from lwkv.benchmarks.throttled.remote import installed_in
from lwkv.integrations.vllm.scheduler.lookup import costs
from lwkv.integrations.vllm.scheduler.lookup.measured.prefill_times import PrefillTimes
from lwkv.integrations.vllm.scheduler.lookup.patience import Patience
from lwkv.keys import ChunkKey, LayerKey
from lwkv.storage.lower_tiers import LowerTiers

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


class Frozen:
    """Reads of a tier that return for these chunks only, until `gate` is open."""

    def __init__(self, tier: Any, chunks: Collection[ChunkKey]) -> None:
        self.gate = threading.Event()
        self._chunks = {*chunks}
        self._get = tier.get
        tier.get = self

    def __call__(self, keys: Sequence[LayerKey], *arguments: Any) -> Any:
        if not self._chunks.issuperset(key.chunk for key in keys):
            assert self.gate.wait(300.0)
        return self._get(keys, *arguments)


def test_a_tier_that_freezes_in_the_middle_of_a_prompt_costs_it_what_has_not_come(
    llama: Path, plain: Elsewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For how long a request waits is simulated in tests/properties; here, until four chunks are there."""
    installed_in(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # A lone request waits for a tier that was never read; of one that is known it loads while it is computed.
    monkeypatch.setattr(LowerTiers, "read_back_first", lambda tiers: None)
    monkeypatch.setattr(costs, "LOOK_UP_S", 100.0)
    # As if a token took a millisecond, whatever else keeps this machine busy.
    add = PrefillTimes.add
    monkeypatch.setattr(PrefillTimes, "add", lambda times, at, n, _: add(times, at, n, 0.01 + 0.001 * n))
    settings = {"load_when": "cheaper", "remote_url": "throttled://90000", "load_timeout_s": 1000}
    prompts = [prompt(900 + number, 10 * CHUNK + 9) for number in range(3)]
    with started(llama, enable_prefix_caching=False, **with_lwkv(**settings)) as engine:
        assert_same(engine.ask(prompts), plain.ask(prompts))
        assert engine.flush()
        engine.evict_all()
        engine.ask([prompt(990, 40)])  # in its steps the scheduler hears of that
        keys = engine.worker.engine.keys(np.array(prompts[0]), ())
        tier = Frozen(remote._OPEN["throttled://90000"], keys[:4])
        with monkeypatch.context() as patched:
            patched.setattr(Patience, "waits_s", lambda _, at_first, there: 0.0 if there >= 4 else 1000.0)
            patched.setattr(Patience, "waits_for_next_s", lambda *_: 1000.0)
            (answer,) = engine.ask(prompts[:1])
        assert not tier.gate.is_set(), "it was answered while the rest of its fetch was still under way"
        assert_same([answer], plain.ask(prompts[:1]))
        assert answer.cached == 4 * CHUNK, "and what had come was loaded"
        assert engine.metric("vllm:lwkv_waits_cut_short") == 1
        assert not engine.metric("vllm:lwkv_prefetches_given_up")
        tier.gate.set()
        assert_same(engine.ask(prompts), plain.ask(prompts))
        engine.at_rest()
