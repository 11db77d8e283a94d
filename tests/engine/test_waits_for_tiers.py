"""How long a retrieval waits for lower tiers, and when it does not."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine.rig import CHUNK, LAYERS, chunk_of, prompt, store, store_in
from oracle import MemoryTier, Oracle, require_rest, run_slots

import lwkv.pipeline.tier_pages
from lwkv.engine import Request
from lwkv.storage import Status


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("buffered", [False, True], ids=["paged", "buffer"])
def test_a_layer_is_waited_for_and_computed_while_the_next_one_has_not_arrived(
    oracle: Oracle, buffered: bool, prefetch: int
) -> None:
    tokens, into = prompt(1, 16), run_slots(64, 16)
    tier, gates = MemoryTier(), [threading.Event() for _ in range(LAYERS)]
    store_in(oracle, tier, [tokens])
    tier.fails = lambda key: Status.OK if gates[key.layer].wait(20) else Status.ERROR
    with oracle.engine(CHUNK, tiers=[tier], enable_blending=buffered, prefetch_layers=prefetch) as engine:
        steps = engine.retrieve_layer(tokens, slot_mapping=into)
        next(steps), next(steps)
        for layer, gate in enumerate(gates):
            gate.set()
            mask = next(steps)
            oracle.expect(tokens, into, layers=[layer])
            oracle.check()
        assert isinstance(mask, torch.Tensor)
        assert mask.all()
        require_rest(engine)


def test_without_sync_the_host_waits_for_slow_tiers_in_the_last_step_only(
    oracle: Oracle, hanging: MemoryTier
) -> None:
    with oracle.engine(CHUNK, tiers=[hanging]) as engine:
        steps = engine.retrieve_layer(prompt(1, 16), slot_mapping=run_slots(64, 16), sync=False)
        for _ in range(LAYERS + 1):
            next(steps)
        oracle.check()
        hanging.gate.set()
        mask = next(steps)
        assert isinstance(mask, torch.Tensor)
        assert mask.all()
        oracle.expect(prompt(1, 16), run_slots(64, 16))
        oracle.check()
        steps.close()
        require_rest(engine)


def test_a_tier_that_hangs_is_a_miss_after_the_timeout(oracle: Oracle, hanging: MemoryTier) -> None:
    with oracle.engine(CHUNK, tiers=[hanging], load_timeout_s=0.05) as engine:
        store(oracle, engine, prompt(2, 8), run_slots(0, 8))
        requests = [Request(prompt(1, 16), run_slots(64, 16)), Request(prompt(2, 8), run_slots(96, 8))]
        steps = list(engine.retrieve_batch(requests))
        assert len(steps) == LAYERS + 2
        assert [int(mask.sum()) for mask in steps[-1]] == [0, 8]
        oracle.expect(prompt(2, 8), run_slots(96, 8))
        oracle.check()
        hanging.gate.set()
        require_rest(engine)


def test_what_arrives_after_the_timeout_never_reaches_the_cache(oracle: Oracle, hanging: MemoryTier) -> None:
    with oracle.engine(CHUNK, tiers=[hanging], load_timeout_s=0.05, prefetch_layers=0) as engine:
        steps = engine.retrieve_layer(prompt(1, 16), slot_mapping=run_slots(64, 16))
        next(steps), next(steps), next(steps)
        hanging.gate.set()
        *_, mask = steps
        assert not mask.any()
        oracle.check()
        require_rest(engine)


def test_closing_does_not_wait_for_ever_for_a_tier_that_hangs(oracle: Oracle, hanging: MemoryTier) -> None:
    engine = oracle.engine(CHUNK, tiers=[hanging], load_timeout_s=0.02)
    assert not engine.retrieve(prompt(1, 16), slot_mapping=run_slots(64, 16)).any()
    engine.close(timeout_s=0.05)
    hanging.gate.set()
    oracle.check()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """How many futures a retrieval waited for, and how long it would have."""
    waited: list[tuple[int, float]] = []

    def record(futures: Sequence[Any], timeout: float) -> Any:
        waited.append((len(futures), timeout))
        return wait(futures, 0)

    monkeypatch.setattr(lwkv.pipeline.tier_pages, "wait", record)
    return waited


def test_the_deadline_of_a_layer_counts_from_when_it_was_asked_for(
    oracle: Oracle, hanging: MemoryTier, waits: list[tuple[int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the model took for the layers before."""
    now = [0.0]
    with oracle.engine(CHUNK, tiers=[hanging], load_timeout_s=12, prefetch_layers=0) as engine:
        engine._parts = replace(engine._parts, clock=lambda: now[0])
        record = lwkv.pipeline.tier_pages.wait

        def answer(futures: Any, timeout: float) -> None:
            record(futures, timeout)
            hanging.gate.set()
            assert not wait(futures, 20).not_done

        monkeypatch.setattr(lwkv.pipeline.tier_pages, "wait", answer)
        steps = engine.retrieve_layer(prompt(1, 16), slot_mapping=run_slots(64, 16))
        for _ in range(LAYERS + 1):
            next(steps)
            if hanging.gate.is_set():
                assert engine._storage.wait_idle(20)
                hanging.gate.clear()
            now[0] += 5
        assert next(steps).all()  # type: ignore[union-attr]
        # Layer 0 is asked for at 0 s and waited for at 10 s, layer 2 at 15 s and 20 s; layer 1 has arrived.
        assert waits == [(1, 2.0), (1, 7.0)]
        oracle.expect(prompt(1, 16), run_slots(64, 16))
        oracle.check()
        steps.close()
        require_rest(engine)


def test_nobody_waits_for_layers_of_chunks_that_were_lost_before(
    oracle: Oracle, waits: list[tuple[int, float]]
) -> None:
    tier = MemoryTier()
    store_in(oracle, tier, [prompt(1, 16)])
    with oracle.engine(CHUNK, tiers=[tier], prefetch_layers=0) as engine:
        store(oracle, engine, prompt(2, 8), run_slots(0, 8))
        tier.gate.clear()
        requests = [Request(prompt(1, 16), run_slots(64, 16)), Request(prompt(2, 8), run_slots(96, 8))]
        *_, masks = engine.retrieve_batch(requests)
        tier.gate.set()
        assert [int(mask.sum()) for mask in masks] == [0, 8]
        assert [count for count, _ in waits] == [1] + [0] * (LAYERS - 1)
        oracle.expect(prompt(2, 8), run_slots(96, 8))
        oracle.check()
        require_rest(engine)


def test_counters_tell_why_chunks_were_lost(oracle: Oracle, waits: list[tuple[int, float]]) -> None:
    tier, prompts = MemoryTier(), [prompt(i, 8) for i in range(4)]
    store_in(oracle, tier, prompts)
    endings = {0: Status.MISS, 1: Status.ERROR, 2: Status.ERROR}
    with oracle.engine(CHUNK, tiers=[tier]) as engine:
        lost = {chunk_of(engine, prompts[i], 0): ending for i, ending in endings.items()}
        tier.fails = lambda key: lost.get(key.chunk, Status.OK)
        requests = [Request(tokens, run_slots(32 * i, 8)) for i, tokens in enumerate(prompts[:3])]
        steps = engine.retrieve_batch(requests)
        next(steps)
        assert engine._storage.wait_idle(20)
        list(steps)
        tier.gate.clear()
        assert not engine.retrieve(prompts[3], slot_mapping=run_slots(96, 8)).any()
        tier.gate.set()
        require_rest(engine)
        stats = engine.stats()
        reasons = {name: count for name, count in stats.items() if name.startswith("load_failures")}
        assert reasons == {
            "load_failures": 4,
            "load_failures_miss": 1,
            "load_failures_error": 2,
            "load_failures_late": 1,
        }
