"""The cursor over a retrieval's layers: what it has queued and waited for, and that nothing comes twice."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

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
    with oracle.engine(8, lookahead=0) as engine:
        oracle.compute(TOKENS, FROM)
        engine.store(TOKENS, slot_mapping=FROM)
        assert engine.flush()
        yield engine
        require_rest(engine)


@pytest.fixture
def calls(engine: CacheEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is queued and waited for, with its layer."""
    calls: list[tuple[str, int]] = []
    loader = engine.connector.loader

    def note(name: str) -> None:
        call = getattr(loader, name)

        def noted(load: Any, layer: int, *rest: Any) -> None:
            calls.append((name.removesuffix("_layer"), layer))
            call(load, layer, *rest)

        monkeypatch.setattr(loader, name, noted)

    note("load_layer")
    note("wait_layer")
    return calls


def test_a_layer_is_queued_before_the_model_waits_for_the_one_before(
    engine: CacheEngine, calls: list[tuple[str, int]]
) -> None:
    retrieval, steps = engine.retrieval([Request(TOKENS, INTO)]), []
    assert retrieval.open() == [24]
    for layer in range(LAYERS):
        retrieval.advance(layer)
        steps.append(calls.copy())
        calls.clear()
    assert retrieval.finish()[0].all()
    assert steps == [
        [("load", 0)],
        [("load", 1), ("wait", 0)],
        [("load", 2), ("wait", 1)],
        [("load", 3), ("wait", 2)],
    ]
    assert calls == [("wait", 3)]


def test_without_sync_the_model_waits_for_the_last_layer_only(
    engine: CacheEngine, calls: list[tuple[str, int]]
) -> None:
    retrieval = engine.retrieval([Request(TOKENS, INTO)], sync=False)
    retrieval.open()
    assert retrieval.finish()[0].all()
    assert calls == [("load", 0), ("load", 1), ("load", 2), ("load", 3), ("wait", 3)]


def test_to_advance_again_or_back_does_nothing(engine: CacheEngine, calls: list[tuple[str, int]]) -> None:
    retrieval = engine.retrieval([Request(TOKENS, INTO)])
    retrieval.open()
    retrieval.advance(2)
    before = calls.copy()
    for layer in (2, 0, 1, -1):
        retrieval.advance(layer)
    assert calls == before
    assert retrieval.reached == 2
    assert retrieval.finish()[0].all()


def test_layers_that_are_passed_over_are_queued_and_waited_for_in_their_order(
    oracle: Oracle, engine: CacheEngine, calls: list[tuple[str, int]]
) -> None:
    retrieval = engine.retrieval([Request(TOKENS, INTO)])
    retrieval.open()
    retrieval.advance(LAYERS)
    for name in ("load", "wait"):
        assert [layer for call, layer in calls if call == name] == list(range(LAYERS))
    for layer in range(LAYERS):
        oracle.read(TOKENS, INTO, layer)
    oracle.expect(TOKENS, INTO, retrieval.finish()[0])
    oracle.check()


@pytest.mark.parametrize("reached", [None, -1, 0, 2, LAYERS])
def test_one_that_is_dropped_gives_everything_back_at_once(engine: CacheEngine, reached: int | None) -> None:
    retrieval = engine.retrieval([Request(TOKENS, INTO)])
    if reached is not None:
        retrieval.open()
        retrieval.advance(reached)
        assert engine.stats()["pins"] > 0
    gc.disable()
    try:
        del retrieval
        require_rest(engine)
    finally:
        gc.enable()


def test_layers_that_came_together_are_waited_for_once_by_each_stream(
    platform: Platform, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, oracle = 12, Oracle(platform, device, dims=Dims(layers=12))
    with oracle.engine(8, staging_bytes=6 * 4 * 3 * oracle.page_bytes(8)) as engine:
        oracle.compute(TOKENS, FROM)
        engine.store(TOKENS, slot_mapping=FROM)
        assert engine.flush()
        loader, waits = engine.connector.loader, list[Any]()
        let_wait = loader._let_wait

        def noted(stream: Any, event: Any) -> None:
            waits.append((stream, event))
            let_wait(stream, event)

        monkeypatch.setattr(loader, "_let_wait", noted)
        retrieval = engine.retrieval([Request(TOKENS, INTO)])
        retrieval.open()
        retrieval.advance(layers)
        load, other = retrieval._load, platform.new_stream(device)
        assert load is not None
        events = list(dict.fromkeys(load.arrived))
        assert len(events) < layers
        assert [event for _, event in waits] == events
        with platform.use_stream(other):
            loader.wait_layer(load, layers - 1)
            loader.wait_layer(load, layers - 1)
        assert waits[len(events) :] == [(other, events[-1])]
        loader.wait_layer(load, layers - 1)
        oracle.expect(TOKENS, INTO, retrieval.finish()[0])
        oracle.check()
