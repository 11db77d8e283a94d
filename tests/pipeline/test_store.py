"""The cursor over a store's layers."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from oracle import Dims, Oracle, require_rest, run_slots

from lwkv.engine import CacheEngine, Request
from lwkv.platforms import Platform

LAYERS = 4
TOKENS = list(range(24))
FROM, INTO = run_slots(0, 24), run_slots(32, 24)


@pytest.fixture
def oracle(platform: Platform, device: torch.device) -> Oracle:
    return Oracle(platform, device, dims=Dims(layers=LAYERS))


@pytest.fixture
def engine(oracle: Oracle) -> Iterator[CacheEngine]:
    with oracle.engine(8) as engine:
        oracle.compute(TOKENS, FROM)
        yield engine
        require_rest(engine)


def require_stored(oracle: Oracle, engine: CacheEngine) -> None:
    assert engine.flush()
    mask = engine.retrieve(TOKENS, slot_mapping=INTO)
    assert mask.all()
    oracle.expect(TOKENS, INTO, mask)
    oracle.check()


@pytest.mark.parametrize("layers", [[], [0], [0, 1, 2, 3], [2], [1, 1, 0, 3], [3, 3]], ids=str)
def test_whatever_layers_it_was_advanced_to_all_are_stored_once(
    oracle: Oracle, engine: CacheEngine, layers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, save_layers = [], engine.connector.saver.save_layers
    monkeypatch.setattr(
        engine.connector.saver, "save_layers", lambda save, n: (saved.extend(n), save_layers(save, n))
    )
    storing = engine.storing([Request(TOKENS, FROM)])
    for layer in layers:
        storing.advance(layer)
        assert storing.next_layer == max(layers[: layers.index(layer) + 1]) + 1
    storing.commit()
    assert storing.next_layer == LAYERS
    require_stored(oracle, engine)
    assert saved == list(range(LAYERS))


@pytest.mark.parametrize("reached", [None, 0, LAYERS - 1])
def test_one_that_is_dropped_stores_nothing_and_gives_everything_back_at_once(
    engine: CacheEngine, reached: int | None
) -> None:
    storing = engine.storing([Request(TOKENS, FROM)])
    if reached is not None:
        storing.advance(reached)
        assert engine.stats()["writes_in_flight"] == 3
    gc.disable()
    try:
        del storing
        require_rest(engine)
    finally:
        gc.enable()
    assert engine.lookup(TOKENS) == 0


@pytest.mark.parametrize("committed", [True, False])
def test_where_the_wait_for_the_device_fails_nothing_but_the_pages_is_held(
    oracle: Oracle, committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(save: object) -> None:
        raise RuntimeError("the device is lost, says the test")

    with oracle.engine(8) as engine:
        oracle.compute(TOKENS, FROM)
        engine.store(TOKENS[:8], slot_mapping=FROM[:8])
        assert engine.flush()
        with monkeypatch.context() as broken:
            broken.setattr(engine.connector.saver, "end_save", fail)
            storing = engine.storing([Request(TOKENS, FROM)])
            storing.advance(0)
            (storing.commit if committed else storing.close)()
            assert engine.flush()
        stats = engine.stats()
        assert (stats["pins"], stats["writes_in_flight"], stats["transfer_errors"]) == (0, 0, 1)
        assert engine.lookup(TOKENS) == 8
        assert stats["page_references"] == 3 * LAYERS, "the device may still write to those"
