"""An engine that is closed while retrievals and stores are under way."""

from __future__ import annotations

from typing import Any

import pytest
from engine.rig import CHUNK, LAYERS, prompt, require_closed, store
from oracle import MemoryTier, Oracle, run_slots

from lwkv.engine import Request
from lwkv.errors import ClosedError
from lwkv.steps import LayerSteps


def test_closing_waits_for_what_is_in_flight(oracle: Oracle) -> None:
    engine, tier = None, MemoryTier()
    engine = oracle.engine(CHUNK, tiers=[tier])
    oracle.compute(prompt(1, 16), run_slots(0, 16))
    engine.store(prompt(1, 16), slot_mapping=run_slots(0, 16))
    engine.close()
    require_closed(engine)
    assert tier.closed
    assert len(tier.pages) == 2 * LAYERS


@pytest.mark.parametrize("taken", range(1, LAYERS + 2))
def test_a_retrieval_may_end_after_the_engine_was_closed(oracle: Oracle, taken: int) -> None:
    engine = oracle.engine(CHUNK)
    store(oracle, engine, prompt(1, 16), run_slots(0, 16))
    steps = engine.retrieve_layer(prompt(1, 16), slot_mapping=run_slots(64, 16))
    for _ in range(taken):
        next(steps)
    engine.close()
    *_, mask = steps
    assert mask.all()
    oracle.expect(prompt(1, 16), run_slots(64, 16))
    oracle.check()
    require_closed(engine)


@pytest.mark.parametrize("taken", range(1, LAYERS + 2))
def test_a_retrieval_may_be_given_up_after_the_engine_was_closed(oracle: Oracle, taken: int) -> None:
    engine = oracle.engine(CHUNK)
    store(oracle, engine, prompt(1, 16), run_slots(0, 16))
    steps = engine.retrieve_layer(prompt(1, 16), slot_mapping=run_slots(64, 16))
    for _ in range(taken):
        next(steps)
    engine.close()
    assert engine.stats()["chunks"] == 2
    steps.close()
    require_closed(engine)
    assert engine.stats()["chunks"] == engine.stats()["pages_in_use"] == 0


@pytest.mark.parametrize("taken", range(1, LAYERS + 1))
def test_a_store_may_end_after_the_engine_was_closed(oracle: Oracle, taken: int) -> None:
    engine = oracle.engine(CHUNK)
    oracle.compute(prompt(1, 16), run_slots(0, 16))
    steps = engine.store_layer(prompt(1, 16), slot_mapping=run_slots(0, 16))
    for _ in range(taken):
        next(steps)
    engine.close()
    assert len(list(steps)) == LAYERS + 1 - taken
    require_closed(engine)


def test_a_closed_engine_says_so(oracle: Oracle) -> None:
    engine = oracle.engine(CHUNK)
    engine.close()
    engine.close()
    arguments: Any = {"slot_mapping": run_slots(0, 8)}
    for call in (
        lambda: engine.lookup(prompt(1, 8)),
        lambda: engine.retrieve_layer(prompt(1, 8), **arguments),
        lambda: engine.store(prompt(1, 8), **arguments),
        lambda: engine.store_batch([Request(prompt(1, 8), run_slots(0, 8))]),
        engine.freeze,
        engine.__enter__,
        lambda: LayerSteps(engine).begin([Request(prompt(1, 8), run_slots(0, 8))], []),
    ):
        with pytest.raises(ClosedError, match="make a new one"):
            call()
    assert engine.flush()
    assert engine.stats()["pages_in_use"] == 0
