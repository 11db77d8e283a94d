"""The XPU platform against the signatures of the installed torch.xpu; nothing here runs on hardware."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from lwkv.platforms.xpu import XPU

FUNCTIONS = [
    "is_available", "device_count", "current_device", "set_device", "current_stream", "set_stream",
    "synchronize", "mem_get_info",
]  # fmt: skip
METHODS = [
    "Stream.wait_event", "Stream.wait_stream", "Stream.synchronize",
    "Event.record", "Event.query", "Event.synchronize", "Event.elapsed_time",
]  # fmt: skip
DEVICE = torch.device("xpu", 1)


def signatures_of_torch_xpu() -> Mapping[str, inspect.Signature | None]:
    """What the platform may use, as the installed torch declares it."""
    found: dict[str, inspect.Signature | None] = {
        name: inspect.signature(getattr(torch.xpu, name)) for name in FUNCTIONS
    }
    for kind in ("Stream", "Event"):
        made = inspect.signature(getattr(torch.xpu, kind).__new__)
        found[kind] = made.replace(parameters=list(made.parameters.values())[1:])
    for name in METHODS:
        kind, _, method = name.partition(".")
        found[name] = inspect.signature(getattr(getattr(torch.xpu, kind), method))
    return {**found, "Stream.sycl_queue": None, "Stream.device_index": None}


def test_every_call_fits_the_installed_torch(
    make_stub: Callable[..., Any], use_everything: Callable[[Any, torch.device], None]
) -> None:
    make_stub("xpu", signatures_of_torch_xpu())
    use_everything(XPU(), DEVICE)


def test_the_attributes_are_the_ones_that_torch_names() -> None:
    assert "self.sycl_queue" in inspect.getsource(torch.xpu.Stream)
    assert "stream.device_index" in inspect.getsource(torch.xpu.set_stream)


def test_a_stub_refuses_what_torch_xpu_does_not_know(make_stub: Callable[..., Any]) -> None:
    stub = make_stub("xpu", signatures_of_torch_xpu())
    with pytest.raises(AttributeError, match="default_stream"):
        stub.default_stream()
    with pytest.raises(TypeError):
        stub.Event(enable_timing=True, interprocess=True, external=True)


def test_events_are_made_with_timing_alone(make_stub: Callable[..., Any]) -> None:
    only_timing = inspect.signature(lambda enable_timing=False: None)
    make_stub("xpu", {**signatures_of_torch_xpu(), "Event": only_timing})
    XPU().new_event(timing=True, blocking=True)


def test_priorities_are_zero_or_minus_one(make_stub: Callable[..., Any]) -> None:
    seen: list[int] = []
    stub = make_stub("xpu", signatures_of_torch_xpu())
    checked = stub.Stream.__init__

    def look(this: object, device: object, priority: int) -> None:
        seen.append(priority)
        checked(this, device, priority=priority)

    stub.Stream.__init__ = look
    XPU().new_stream(DEVICE)
    XPU().new_stream(DEVICE, high_priority=True)
    assert seen == [0, -1]


def test_a_new_stream_is_not_the_one_the_thread_started_with(make_stub: Callable[..., Any]) -> None:
    stub = make_stub("xpu", signatures_of_torch_xpu())
    made: list[object] = []

    def pool(device: torch.device, priority: int) -> object:
        made.append(stub.current_stream(device) if not made else object())
        return made[-1]

    stub.Stream = pool
    stream = XPU().new_stream(DEVICE)
    assert stream != stub.current_stream(DEVICE)
    assert len(made) == 2


@pytest.mark.parametrize("waits", ["the host", "a stream"])
def test_bytes_of_a_save_are_awaited_through_their_stream(make_stub: Callable[..., Any], waits: str) -> None:
    stub = make_stub("xpu", signatures_of_torch_xpu())
    platform = XPU()
    stream, other, event = platform.new_stream(DEVICE), platform.new_stream(DEVICE), platform.new_event()
    stub.calls.clear()
    platform.d2h_fence(stream, event, None if waits == "the host" else other)
    assert stub.calls == ["Stream.synchronize"]


def test_time_that_cannot_be_told_is_none() -> None:
    class Untimed:
        def elapsed_time(self, end: object) -> float:
            raise NotImplementedError("built with an old SYCL compiler")

    assert XPU().elapsed_ms(Untimed(), Untimed()) is None


def test_the_features_are_those_of_torch_xpu() -> None:
    features = XPU().features
    assert features.layerwise
    assert features.blending
    assert features.stream_priority
    assert not features.host_register
    assert not features.batch_copy


def test_memory_cannot_be_registered() -> None:
    memory = torch.zeros(16, dtype=torch.uint8)
    assert not XPU().host_register(memory)
    XPU().host_unregister(memory)


def test_cuda_is_never_touched(
    make_stub: Callable[..., Any], use_everything: Callable[[Any, torch.device], None], poisoned_cuda: None
) -> None:
    make_stub("xpu", signatures_of_torch_xpu())
    use_everything(XPU(), DEVICE)
