"""Loads and stores come behind what SGLang has queued on both of its streams, and would else be wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
from integrations.sglang.fake_sglang import FakeSGLang
from oracle import WrongBytesError

from lwkv.integrations.sglang.order import ModelStreams
from lwkv.pipeline.pinned_load import PinnedLoad
from lwkv.platforms import Platform

A = list(range(100, 121))


def play(make: Callable[..., FakeSGLang], platform: Platform, own_stream: bool) -> None:
    """Store, evict and load, with the model on a stream of its own, or all of SGLang on one late stream."""
    sglang = make(stream=own_stream)
    sglang.is_spoiled = True
    if not own_stream:
        sglang.stream = platform.new_stream(sglang.oracle.device)
        sglang.stream.late = True
    with platform.use_stream(
        sglang.stream if not own_stream else platform.current_stream(sglang.oracle.device)
    ):
        for _ in range(2):
            sglang.run(A)
            sglang.evict()
        sglang.run(A)
    sglang.oracle.check()
    sglang.is_spoiled = False


@pytest.mark.parametrize("own_stream", [True, False])
def test_what_is_stored_and_loaded_is_right(
    make: Callable[..., FakeSGLang], platform: Platform, own_stream: bool
) -> None:
    play(make, platform, own_stream)


@pytest.mark.parametrize(
    ("wait", "own_stream"), [("_let_wait_for_forward", True), ("_let_wait_for_current", False)]
)
def test_without_a_wait_the_bytes_are_wrong(
    make: Callable[..., FakeSGLang],
    platform: Platform,
    monkeypatch: pytest.MonkeyPatch,
    wait: str,
    own_stream: bool,
) -> None:
    if platform.device_type != "cpu":
        pytest.skip("without the wait a real device may still be in time; the CPU is late on purpose")
    monkeypatch.setattr(ModelStreams, wait, lambda self, stream: None)
    with pytest.raises(WrongBytesError):
        play(make, platform, own_stream)


@pytest.mark.parametrize("first_buffers", [1, 4], ids=["by waits", "at the start"])
@pytest.mark.parametrize("is_waited_for", [True, False])
def test_the_model_comes_behind_the_layers_of_a_load_that_is_late(
    make: Callable[..., FakeSGLang],
    platform: Platform,
    monkeypatch: pytest.MonkeyPatch,
    first_buffers: int,
    is_waited_for: bool,
) -> None:
    """Whenever its layers are queued: without the waits the model reads what was there before."""
    if platform.device_type != "cpu":
        pytest.skip("without the wait a real device may still be in time; the CPU is late on purpose")
    monkeypatch.setattr("lwkv.connectors.loader.FIRST_BUFFERS", first_buffers)
    sglang = make()
    sglang.run(A)
    sglang.evict()
    loader, waits = sglang.engine.connector.loader, list[object]()
    let_wait = loader._let_wait

    def note_wait(stream: object, event: object) -> None:
        if is_waited_for:
            let_wait(stream, event)
        waits.append(event)

    loader.lane.kernels.late = True
    monkeypatch.setattr(loader, "_let_wait", note_wait)
    sglang.is_spoiled = not is_waited_for
    with nullcontext() if is_waited_for else pytest.raises(WrongBytesError):
        prompt = sglang.prompt(A)
        sglang.match(prompt)
        sglang.admit(prompt)
        sglang.forward([prompt])
        # The model has read all layers before the load is given back, which waits for it.
        platform.synchronize_stream(sglang.stream)
        sglang.tick()
        sglang.oracle.check()
    assert len(waits) >= 3


@pytest.mark.parametrize(("layers", "drafts"), [(4, 1), (4, 4), (5, 2)])
@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_draft_reads_nothing_before_it_is_loaded(
    make: Callable[..., FakeSGLang],
    platform: Platform,
    monkeypatch: pytest.MonkeyPatch,
    layers: int,
    drafts: int,
    is_waited_for: bool,
) -> None:
    """Its pool waits for nothing: the last wait of the target's pool is for it, or it would read zeros."""
    if platform.device_type != "cpu":
        pytest.skip("without the wait a real device may still be in time; the CPU is late on purpose")
    sglang = make(layers=layers, drafts=drafts, pages=64 * (layers + drafts))
    sglang.run(A)
    sglang.evict()
    wait = PinnedLoad.wait

    def wait_for_target(load: PinnedLoad, layer: int) -> int:
        wait(load, min(layer, layers - 1))
        return layer + 1

    if not is_waited_for:
        monkeypatch.setattr(PinnedLoad, "wait", wait_for_target)
    loader = sglang.engine.connector.loader
    # Every layer is late by itself: the last one of the target comes before those of drafts.
    monkeypatch.setattr(loader, "_share", lambda most, least, layer: range(layer, layer + 1))
    sglang.is_spoiled = not is_waited_for
    prompt = sglang.prompt(A)
    sglang.match(prompt)
    sglang.admit(prompt)
    loader.lane.kernels.late = True
    index = sglang.link.start_layer_wise_loading()
    sglang.counter.set_consumer(index)
    with platform.use_stream(sglang.stream):
        for layer in range(layers + drafts):
            if layer < layers:
                sglang.counter.wait_until(layer)
            sglang._compute(prompt, layer)
    # The model has read all layers before anybody else waits for the load.
    platform.synchronize_stream(sglang.stream)
    assert sglang.link.finish_layer_wise_loading(index)
    with nullcontext() if is_waited_for else pytest.raises(WrongBytesError):
        sglang.oracle.check()
    sglang._insert(prompt)
    sglang.tick()
