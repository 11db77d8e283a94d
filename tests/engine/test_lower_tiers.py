"""Loads from lower tiers: what is asked for, and what a layer costs that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engine.rig import CHUNK, LAYERS, chunk_of, prompt, store_in
from oracle import MemoryTier, Oracle, refuse_threads, require_rest, run_slots

from lwkv.engine import Request
from lwkv.storage import Status


@pytest.mark.parametrize("buffered", [False, True], ids=["paged", "buffer"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layer_that_fails_costs_only_the_tokens_of_its_chunk(
    oracle: Oracle, layer: int, buffered: bool
) -> None:
    tier, prompts = MemoryTier(), [prompt(i, 24) for i in range(3)]
    store_in(oracle, tier, prompts)
    with oracle.engine(CHUNK, tiers=[tier], enable_blending=buffered) as engine:
        tier.fails = error_of(layer, chunk_of(engine, prompts[1], 1))
        slots = [run_slots(32 * i + 3, 24, backwards=i == 2) for i in range(3)]
        requests = [Request(*request) for request in zip(prompts, slots, strict=True)]
        promised, *_, masks = engine.retrieve_batch(requests)
        assert promised == [24, 24, 24]
        wanted = [[True] * 24, [True] * 8 + [False] * 8 + [True] * 8, [True] * 24]
        assert [mask.tolist() for mask in masks] == wanted
        for tokens, places, mask in zip(prompts, slots, masks, strict=True):
            oracle.expect(tokens, places, mask)
        oracle.expect(prompts[1], slots[1], ~masks[1].numpy(), layers=range(layer))
        oracle.check()
        require_rest(engine)
        assert engine.stats()["load_failures"] == 1


def error_of(layer: int, chunk: Any) -> Callable[[Any], Status]:
    return lambda key: Status.ERROR if (key.chunk, key.layer) == (chunk, layer) else Status.OK


def test_a_chunk_that_vanishes_after_lookup_is_a_miss(oracle: Oracle) -> None:
    tier = MemoryTier()
    store_in(oracle, tier, [prompt(1, 16)])
    with oracle.engine(CHUNK, tiers=[tier]) as engine:
        tier.fails = lambda key: Status.MISS
        promised, *_, mask = engine.retrieve_layer(prompt(1, 16), slot_mapping=run_slots(64, 16))
        assert (promised, mask.any()) == (16, False)
        oracle.check()
        require_rest(engine)


def test_what_came_from_a_lower_tier_is_in_host_memory_next_time(oracle: Oracle) -> None:
    tier = MemoryTier()
    store_in(oracle, tier, [prompt(1, 16)])
    with oracle.engine(CHUNK, tiers=[tier]) as engine:
        for into in (64, 96):
            assert engine.retrieve(prompt(1, 16), slot_mapping=run_slots(into, 16)).all()
            oracle.expect(prompt(1, 16), run_slots(into, 16))
            require_rest(engine)
        assert len(tier.asked) == 2 * LAYERS
        oracle.check()


def test_only_the_chunks_to_load_are_asked_for(oracle: Oracle) -> None:
    tier = MemoryTier()
    store_in(oracle, tier, [prompt(1, 24)])
    with oracle.engine(CHUNK, tiers=[tier]) as engine:
        mask = [i >= 8 for i in range(24)]
        assert engine.retrieve(prompt(1, 24), mask, slot_mapping=run_slots(64, 24)).tolist() == mask
        wanted = {chunk_of(engine, prompt(1, 24), number) for number in (1, 2)}
        assert {key.chunk for key in tier.asked} == wanted
        oracle.expect(prompt(1, 24), run_slots(64, 24), mask)
        oracle.check()


@pytest.mark.parametrize("kind", ["growth", "memory-look-up", "memory-read", "memory-write"])
def test_a_thread_that_cannot_start_is_a_miss_and_nothing_stays_held(
    oracle: Oracle, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = MemoryTier()
    store_in(oracle, tier, [prompt(1, 16)])
    with oracle.engine(CHUNK, tiers=[tier]) as engine:
        with monkeypatch.context() as limited:
            refuse_threads(limited, kind)
            assert engine.lookup(prompt(1, 16)) == (0 if kind == "memory-look-up" else 16)
            loaded = int(engine.retrieve(prompt(1, 16), slot_mapping=run_slots(64, 16)).sum())
            assert loaded == (0 if kind in ("memory-look-up", "memory-read") else 16)
            oracle.expect(prompt(1, 16)[:loaded], run_slots(64, loaded))
            oracle.compute(prompt(2, 16), run_slots(0, 16))
            engine.store(prompt(2, 16), slot_mapping=run_slots(0, 16))
            assert engine.flush() == (kind != "memory-write")
            assert engine.lookup(prompt(2, 16)) == 16
            require_rest(engine)
        assert engine.lookup(prompt(1, 16)) == 16
        assert "transfer_errors" not in engine.stats()
        oracle.check()
