"""Chunks that were pinned before: their load is right, and gives all back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracle import Dims, Oracle, held_completions, require_rest, run_slots

from lwkv.engine import CacheEngine
from lwkv.errors import RequestError
from lwkv.pipeline.pinned_load import PinnedChunks, PinnedLoad
from lwkv.platforms import Platform
from lwkv.request import Request
from lwkv.steps import LayerSteps

LAYERS, CHUNK = 4, 8
ONE, OTHER = list(range(24)), list(range(100, 116))
FROM = run_slots(0, 40)
INTO_ONE, INTO_OTHER = run_slots(48, 24, backwards=True), run_slots(80, 16)


@pytest.fixture
def oracle(platform: Platform, device: torch.device) -> Oracle:
    return Oracle(platform, device, "sglang_kv", Dims(layers=LAYERS, blocks=32))


@pytest.fixture(params=[1, 2], ids=["a layer a buffer", "two layers a buffer"])
def layers_per_buffer(request: Any) -> int:
    number: int = request.param
    return number


@pytest.fixture(params=[1, 2], ids=["one stream", "two streams"])
def engine(oracle: Oracle, request: Any, layers_per_buffer: int) -> Iterator[CacheEngine]:
    staging = (request.param + 2) * layers_per_buffer * 5 * oracle.page_bytes(CHUNK)
    with oracle.engine(CHUNK, staging_bytes=staging, load_streams=request.param) as engine:
        for tokens, slots in ((ONE, FROM[:24]), (OTHER, FROM[24:])):
            oracle.compute(tokens, slots)
            engine.store(tokens, slot_mapping=slots)
        assert engine.flush()
        yield engine
        require_rest(engine)


def pinned(engine: CacheEngine, tokens: list[int], slots: list[int]) -> PinnedChunks:
    keys = engine.keys(tokens)
    chunks = engine.parts().storage.host.pin_prefix(keys)
    assert len(chunks) == len(keys)
    return PinnedChunks(keys, chunks, torch.tensor(slots, device=engine.connector.device))


def begin(engine: CacheEngine, *loads: PinnedChunks) -> PinnedLoad:
    connector = engine.connector

    def let_wait(stream: Any) -> None:
        connector.platform.wait_stream(stream, connector.platform.current_stream(connector.device))

    return PinnedLoad(engine.parts(), loads, let_wait)


def finish(load: PinnedLoad) -> bool:
    is_loaded = load.finish()
    load.give_back()
    return is_loaded


@pytest.mark.parametrize("layers", [range(LAYERS), [LAYERS - 1], [1, 1, 3], []])
def test_several_are_loaded_whatever_layers_the_model_waits_for(
    oracle: Oracle, engine: CacheEngine, layers: list[int]
) -> None:
    one, other = pinned(engine, ONE, INTO_ONE), pinned(engine, OTHER, INTO_OTHER)
    load = begin(engine, one, other)
    for layer in layers:
        load.wait(layer)
        for earlier in range(layer + 1):
            oracle.read(ONE, INTO_ONE, earlier, f"after layer {layer}")
    assert finish(load)
    oracle.expect(ONE, INTO_ONE)
    oracle.expect(OTHER, INTO_OTHER)
    # What is queued next on the current stream comes behind all of it.
    oracle.zero(INTO_OTHER)
    oracle.check()
    assert engine.flush()
    stats = engine.stats()
    assert (stats["tokens_asked"], stats["tokens_retrieved"], stats["host_hits"]) == (40, 40, 5)


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize(
    ("pages", "layers_together", "waits"),
    [(3, 1, 4), *(pytest.param(*more, marks=pytest.mark.slow) for more in [(1, 1, 1), (5, 30, 1)])],
)
def test_many_layers_in_several_slices_come_in_time_with_the_least_copies(
    platform: Platform, device: torch.device, streams: int, pages: int, layers_together: int, waits: int
) -> None:
    """More layers than are queued ahead, in staging buffers for so many of five pages, or for several layers.

    The model waits for every layer, or leaves some out.
    """
    oracle = Oracle(platform, device, "sglang_kv", Dims(layers=23, blocks=32))
    buffers = {1: 3, 2: 6}[streams]
    staging = buffers * layers_together * pages * oracle.page_bytes(CHUNK)
    with oracle.engine(CHUNK, staging_bytes=staging, load_streams=streams, pages=400) as engine:
        for tokens, slots in ((ONE, FROM[:24]), (OTHER, FROM[24:])):
            oracle.compute(tokens, slots)
            engine.store(tokens, slot_mapping=slots)
        assert engine.flush()
        with counted_copies(engine) as copies:
            load = begin(engine, pinned(engine, ONE, INTO_ONE), pinned(engine, OTHER, INTO_OTHER))
            for layer in range(0, 23, waits):
                load.wait(layer)
                for tokens, slots in ((ONE, INTO_ONE), (OTHER, INTO_OTHER)):
                    oracle.read(tokens, slots, layer, f"after layer {layer}")
            assert finish(load)
            assert engine.flush()
        for tokens, slots in ((ONE, INTO_ONE), (OTHER, INTO_OTHER)):
            oracle.expect(tokens, slots)
        oracle.check()
        slices = -(-5 // pages)
        assert len(copies) == 23 * slices if layers_together == 1 else len(copies) < 23
        assert sum(copies) == 23 * 5 * oracle.page_bytes(CHUNK), "each page once"
        require_rest(engine)


@contextmanager
def counted_copies(engine: CacheEngine) -> Iterator[list[int]]:
    """The bytes of each batch of copies that loads queue."""
    connector, batches = engine.connector, list[int]()
    load_batch = connector.platform.load_batch

    def counted(target: torch.Tensor, batch: Any, stream: Any) -> None:
        batches.append(int(batch.sizes.sum()))
        load_batch(target, batch, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connector.platform, "load_batch", counted)
        yield batches


def test_the_model_is_launched_with_layers_queued_ahead_and_the_host_waits_for_nothing(
    oracle: Oracle, engine: CacheEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, queued = engine.connector.loader, list[int]()
    mark = loader._mark_arrived

    def noted(load: Any, layers: range) -> None:
        queued.extend(layers)
        mark(load, layers)

    monkeypatch.setattr(loader, "_mark_arrived", noted)
    monkeypatch.setattr("lwkv.connectors.loader.FIRST_BUFFERS", 2)
    with held_completions(engine):
        load = begin(engine, pinned(engine, ONE, INTO_ONE))
        assert queued == [0, 1]
        for layer in range(LAYERS):
            load.wait(layer)
            assert len(queued) >= min(layer + 2, LAYERS)
        assert finish(load)
    assert queued == list(range(LAYERS))
    oracle.expect(ONE, INTO_ONE)
    oracle.check()
    assert engine.flush()


def test_layers_that_came_together_are_waited_for_once(
    engine: CacheEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = begin(engine, pinned(engine, ONE, INTO_ONE))
    waits: list[int] = []
    wait_layer = engine.connector.loader.wait_layer
    monkeypatch.setattr(
        engine.connector.loader,
        "wait_layer",
        lambda load, layer, stream: waits.append(layer) or wait_layer(load, layer, stream),
    )
    for layer in (*range(LAYERS), LAYERS - 1):
        load.wait(layer)
    events = {id(event) for event in load._load.arrived}  # type: ignore[union-attr]
    assert len(waits) == len(events)
    assert finish(load)
    assert engine.flush()


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_device_that_fails_ends_the_load_and_keeps_nothing(
    engine: CacheEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    layer: int,
    error: type[Exception],
) -> None:
    fail_at(monkeypatch, engine.connector.loader, "_layers_from", layer, error)
    load = begin(engine, pinned(engine, ONE, INTO_ONE))
    for number in range(LAYERS):
        load.wait(number)
    assert not finish(load)
    assert engine.flush()
    assert caplog.text.count("3 chunks are not loaded") == 1
    stats = engine.stats()
    assert (stats["load_failures"], stats.get("tokens_retrieved", 0)) == (3, 0)


@pytest.mark.parametrize("call", ["wait_layer", "leave_load", "begin_load"])
def test_a_device_that_fails_in_another_call_ends_the_load_too(
    engine: CacheEngine, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with monkeypatch.context() as patch:
        fail_at(patch, engine.connector.loader, call, 0, RuntimeError)
        load = begin(engine, pinned(engine, ONE, INTO_ONE))
        load.wait(0)
        assert not finish(load)
    assert engine.flush()


def test_a_batch_of_nothing_is_over_at_once(engine: CacheEngine) -> None:
    load = begin(engine)
    load.wait(LAYERS - 1)
    assert finish(load)
    assert engine.flush()


@pytest.mark.parametrize(
    "slots",
    [torch.arange(23), torch.arange(24, dtype=torch.int32), torch.arange(24, device="meta")],
    ids=["too few", "other numbers", "another device"],
)
def test_slots_that_do_not_fit_are_refused_and_nothing_is_taken_over(
    engine: CacheEngine, slots: torch.Tensor
) -> None:
    chunks = pinned(engine, ONE, INTO_ONE)
    with pytest.raises(RequestError, match="slots is"):
        begin(engine, PinnedChunks(chunks.keys, chunks.chunks, slots))
    assert engine.stats()["pins"] == 3
    engine.parts().storage.host.unpin(chunks.chunks)


def test_nothing_is_given_back_and_no_thread_is_woken_before_the_caller_says_so(
    engine: CacheEngine,
) -> None:
    load = begin(engine, pinned(engine, ONE, INTO_ONE))
    assert load.finish()
    assert engine.flush()
    assert engine.stats()["pins"] == 3
    load.give_back()
    assert engine.flush()
    assert engine.stats()["pins"] == 0


def test_loads_and_retrievals_take_turns(oracle: Oracle, engine: CacheEngine) -> None:
    for _ in range(3):
        load = begin(engine, pinned(engine, ONE, INTO_ONE))
        load.wait(LAYERS - 1)
        assert finish(load)
        *_, masks = engine.retrieve_batch([Request(OTHER, INTO_OTHER)])
        assert masks[0].all()  # type: ignore[index, union-attr]
        oracle.zero(INTO_ONE)
    oracle.expect(OTHER, INTO_OTHER)
    oracle.check()
    assert engine.flush()


def fail_at(
    patch: pytest.MonkeyPatch, loader: Any, name: str, layer: int, error: type[BaseException]
) -> None:
    """Have a call raise, the first time that it comes to `layer`, and each time where it has none."""
    call, failed = getattr(loader, name), []

    def fail(*arguments: Any) -> Any:
        layers = [argument for argument in arguments if isinstance(argument, int)]
        if layers in ([], [layer]) and not failed:
            failed.append(name)
            raise error("the device fails")
        return call(*arguments)

    patch.setattr(loader, name, fail)


def test_it_takes_the_staging_that_another_load_has_filled_ahead_and_that_one_notices(
    oracle: Oracle,
) -> None:
    """One buffer, with room for two pages: a layer of the load that begins first comes in two slices."""
    with oracle.engine(CHUNK, staging_bytes=3 * 2 * oracle.page_bytes(CHUNK), load_streams=1) as engine:
        for tokens, slots in ((ONE, FROM[:24]), (OTHER, FROM[24:])):
            oracle.compute(tokens, slots)
            engine.store(tokens, slot_mapping=slots)
        assert engine.flush()
        steps = LayerSteps(engine)
        steps.begin([Request(ONE, INTO_ONE)], [])
        assert steps.look_up() == [24]
        assert finish(begin(engine, pinned(engine, OTHER, INTO_OTHER)))
        steps.load_all()
        assert all(mask.all() for mask in steps.wait_for_save().loaded)
        oracle.expect(ONE, INTO_ONE)
        oracle.expect(OTHER, INTO_OTHER)
        oracle.check()
        require_rest(engine)
