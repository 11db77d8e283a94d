"""Saves on a device whose events do not cover its copies to the host, and where an event must not be recorded
anew while a thread waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
from copy_engine import CopyEngine
from oracle import Dims, Oracle, WrongBytesError, run_slots

from lwkv.engine import CacheEngine
from lwkv.platforms.cpu import CPU

HOST = torch.device("cpu")
LAYERS = 5
STREAMS = ("kernels", "copies")
TOKENS, OTHERS = list(range(100, 124)), list(range(300, 324))
HERE, THERE = run_slots(2, 24), run_slots(33, 24, backwards=True)


@pytest.fixture
def engine_device() -> Iterator[CopyEngine]:
    platform = CopyEngine()
    yield platform
    platform.close()


class Model:
    """An engine on the device, whose staging holds one chunk unless told otherwise."""

    def __init__(self, platform: CopyEngine, **settings: Any) -> None:
        self.oracle = Oracle(platform, HOST, dims=Dims(layers=LAYERS, blocks=20))
        self.engine: CacheEngine = self.oracle.engine(8, **{"pages": 96} | settings)

    def save(self, tokens: list[int], slots: list[int]) -> None:
        """Compute and store by layers."""
        steps = self.engine.store_layer(tokens, slot_mapping=slots)
        for layer in range(LAYERS):
            self.oracle.compute(tokens, slots, [layer])
            next(steps)
        next(steps)

    def check_stored(self, tokens: list[int], slots: list[int]) -> None:
        """Load what was stored into blocks of other contents, and compare every byte."""
        assert self.engine.flush()
        self.oracle.zero(slots)
        assert self.engine.retrieve(tokens, slot_mapping=slots).all()
        self.oracle.expect(tokens, slots)
        self.oracle.platform.synchronize_device(HOST)
        self.oracle.check()


@pytest.fixture
def model(engine_device: CopyEngine) -> Iterator[Model]:
    model = Model(engine_device)
    yield model
    model.engine.close()


def test_the_device_is_what_it_says(engine_device: CopyEngine) -> None:
    """An event is reached before the copy in front of it; later work of the stream is not."""
    stream, event = engine_device.new_stream(HOST), engine_device.new_event()
    source, target = torch.full((9,), 7, dtype=torch.uint8), engine_device.alloc_pinned(9)
    target.zero_()
    engine_device.copy_async(target, source, stream)
    engine_device.record(event, stream)
    engine_device.synchronize_event(event)
    assert target.tolist() == [0] * 9
    engine_device.launch(stream, lambda: None)
    CPU.synchronize_stream(engine_device, stream)
    assert target.tolist() == [7] * 9


def test_an_event_that_the_host_waited_for_cannot_be_recorded_anew(engine_device: CopyEngine) -> None:
    stream, event = engine_device.new_stream(HOST), engine_device.new_event()
    engine_device.record(event, stream)
    engine_device.record(event, stream)
    engine_device.synchronize_event(event)
    with pytest.raises(AssertionError, match="recorded anew"):
        engine_device.record(event, stream)


@pytest.mark.parametrize("buffers", [2, 3])
@pytest.mark.parametrize("group_bytes", [0, 1 << 20], ids=["each layer", "groups of layers"])
@pytest.mark.parametrize("late", [mix for n in range(3) for mix in combinations(STREAMS, n)])
def test_what_is_saved_is_what_was_computed(
    engine_device: CopyEngine, buffers: int, group_bytes: int, late: tuple[str, ...]
) -> None:
    model = Model(engine_device, staging_buffers=buffers, group_bytes=group_bytes)
    for name in late:
        getattr(model.engine.connector.saver.lane, name).late = True
    model.save(TOKENS, HERE)
    model.save(OTHERS, THERE)
    model.check_stored(TOKENS, THERE)
    model.check_stored(OTHERS, HERE)
    model.engine.close()


def test_an_event_alone_does_not_say_that_a_buffer_may_be_filled_again(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = model.engine.connector.saver.lane
    with_event = lambda buffer: lane._platform.wait_event(lane.kernels, buffer.emptied)  # noqa: E731
    monkeypatch.setattr(lane, "_wait_emptied", with_event)
    model.save(TOKENS, HERE)
    with pytest.raises(WrongBytesError):
        model.check_stored(TOKENS, THERE)


def test_an_event_alone_does_not_say_that_pages_hold_their_bytes(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence = CPU.d2h_fence
    monkeypatch.setattr(CopyEngine, "d2h_fence", fence)
    model.save(TOKENS, HERE)
    with pytest.raises(WrongBytesError):
        model.check_stored(TOKENS, THERE)


def test_no_event_that_a_thread_waits_for_is_recorded_anew_in_forty_stores(
    engine_device: CopyEngine,
) -> None:
    """The end of one store is waited for while the next ones use the same staging buffers."""
    model = Model(engine_device, staging_bytes=1 << 20, pages=40 * LAYERS * 3)
    for number in range(40):
        tokens = [1000 * (number + 1) + token for token in TOKENS]
        model.save(tokens, HERE)
        if number % 8 == 7:
            model.check_stored(tokens, THERE)
    model.engine.close()


def test_in_bulk_they_are_not_recorded_anew_either(engine_device: CopyEngine) -> None:
    model = Model(engine_device, staging_bytes=1 << 20, pages=40 * LAYERS * 3)
    for number in range(40):
        tokens = [1000 * (number + 1) + token for token in TOKENS]
        model.oracle.compute(tokens, HERE)
        model.engine.store(tokens, slot_mapping=HERE)
    model.check_stored(tokens, THERE)
    model.engine.close()
