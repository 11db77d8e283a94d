"""What is stored: once, whole chunks, and the beginning of what does not all fit."""

from __future__ import annotations

import pytest
import torch
from engine.rig import CHUNK, LAYERS, prompt, store, take
from oracle import Dims, Oracle, held_completions, require_rest, run_slots

from lwkv.engine import Request
from lwkv.errors import RequestError
from lwkv.platforms import Platform


def test_a_chunk_that_lacks_a_slot_is_not_stored(oracle: Oracle) -> None:
    tokens, slots = prompt(1, 24), run_slots(0, 24)
    slots[12] = -1
    with oracle.engine(CHUNK) as engine:
        oracle.compute(tokens, slots)
        engine.store(tokens, slot_mapping=slots)
        require_rest(engine)
        assert engine.stats()["chunks"] == 2
        assert engine.lookup(tokens) == 8


def test_requests_that_share_a_prefix_store_it_once(oracle: Oracle) -> None:
    shared = prompt(1, 16)
    requests = [
        Request(shared + prompt(2, 8), run_slots(0, 24)),
        Request(shared + prompt(3, 8), run_slots(32, 24)),
    ]
    with oracle.engine(CHUNK) as engine:
        for request in requests:
            oracle.compute(request.tokens, request.slot_mapping)
        for _ in engine.store_batch(requests):
            pass
        require_rest(engine)
        assert engine.stats()["chunks"] == 4
        for request in requests:
            oracle.zero(request.slot_mapping)
        *_, masks = engine.retrieve_batch(requests)
        for request, mask in zip(requests, masks, strict=True):
            oracle.expect(request.tokens, request.slot_mapping, mask)
            assert mask.all()
        oracle.check()


def test_where_blocks_are_opaque_a_store_may_begin_inside_one(
    platform: Platform, device: torch.device
) -> None:
    oracle = Oracle(platform, device, "opaque", Dims(blocks=32))
    with oracle.engine(CHUNK) as engine:
        oracle.compute(prompt(1, 16), run_slots(0, 16))
        engine.store(prompt(1, 16), [i >= 3 for i in range(16)], slot_mapping=run_slots(0, 16))
        require_rest(engine)
        assert engine.retrieve(prompt(1, 16), slot_mapping=run_slots(64, 16)).all()
        oracle.expect(prompt(1, 16), run_slots(64, 16))
        oracle.check()
        with pytest.raises(RequestError, match="whole blocks"):
            engine.retrieve(prompt(1, 16), [i >= 3 for i in range(16)], slot_mapping=run_slots(64, 16))


def test_a_chunk_on_its_way_is_not_stored_again(oracle: Oracle) -> None:
    with oracle.engine(CHUNK, pages=LAYERS) as engine:
        oracle.compute(prompt(1, 8), run_slots(0, 8))
        with held_completions(engine):
            for _ in range(2):
                engine.store(prompt(1, 8), slot_mapping=run_slots(0, 8))
            assert "stores_refused" not in engine.stats()
        require_rest(engine)


@pytest.mark.parametrize("taken", range(1, LAYERS + 1))
def test_what_was_given_up_can_be_stored_again_though_its_transfers_have_not_ended(
    oracle: Oracle, taken: int
) -> None:
    with oracle.engine(CHUNK) as engine:
        oracle.compute(prompt(1, 16), run_slots(0, 16))
        with held_completions(engine):
            take(engine.store_layer(prompt(1, 16), slot_mapping=run_slots(0, 16)), taken)
            engine.store(prompt(1, 16), slot_mapping=run_slots(0, 16))
            assert engine.stats()["page_references"] == 4 * LAYERS
        require_rest(engine)
        assert engine.lookup(prompt(1, 16)) == 16


def test_flushing_gives_up_at_its_timeout(oracle: Oracle) -> None:
    with oracle.engine(CHUNK) as engine:
        with held_completions(engine):
            oracle.compute(prompt(1, 8), run_slots(0, 8))
            engine.store(prompt(1, 8), slot_mapping=run_slots(0, 8))
            assert not engine.flush(timeout_s=0.01)
            assert engine.stats()["writes_in_flight"] == 1
            assert engine.lookup(prompt(1, 8)) == 0
        require_rest(engine)
        assert engine.lookup(prompt(1, 8)) == 8


def test_a_prompt_larger_than_memory_leaves_its_beginning_and_no_neighbour_is_dragged_along(
    oracle: Oracle,
) -> None:
    long, short = prompt(1, 40), prompt(2, 16)
    requests = [Request(short, run_slots(0, 16)), Request(long, run_slots(32, 40))]
    with oracle.engine(CHUNK, pages=4 * LAYERS) as engine:
        for request in requests:
            oracle.compute(request.tokens, request.slot_mapping)
        list(engine.store_batch(requests))
        require_rest(engine)
        assert [engine.lookup(tokens) for tokens in (short, long)] == [16, 16]
        assert (engine.stats()["stores_refused"], engine.stats()["chunks_refused"]) == (1, 3)
        *_, masks = engine.retrieve_batch(
            [Request(short, run_slots(80, 16)), Request(long[:16], run_slots(96, 16))]
        )
        assert all(mask.all() for mask in masks)
        oracle.expect(short, run_slots(80, 16))
        oracle.expect(long[:16], run_slots(96, 16))
        oracle.check()


def test_memory_held_by_loads_is_there_for_stores_as_soon_as_they_have_ended(oracle: Oracle) -> None:
    """Nobody has to look anything up in between."""
    with oracle.engine(CHUNK, pages=2 * LAYERS) as engine:
        store(oracle, engine, prompt(1, 16), run_slots(0, 16))
        steps = engine.retrieve_layer(prompt(1, 16), slot_mapping=run_slots(64, 16))
        next(steps)
        store(oracle, engine, prompt(2, 16), run_slots(0, 16))
        assert engine.stats()["chunks_refused"] == 2
        steps.close()
        assert engine.flush()
        store(oracle, engine, prompt(2, 16), run_slots(0, 16))
        assert engine.stats()["chunks_refused"] == 2
        assert engine.lookup(prompt(2, 16)) == 16
