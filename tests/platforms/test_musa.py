"""The MUSA platform against names and signatures of torch_musa; nothing here runs on hardware.

The manifest was read from the source of torch_musa v2.7.1 (commit 8b583b3 of 2026-01-19). Later releases
may differ. It shows that no other name is used, not that these names work.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from lwkv.platforms.musa import MUSA

DEVICE = torch.device("cpu")  # `musa` is not a device name in torch without torch_musa


def signature(text: str) -> inspect.Signature:
    """The signature of a function written as its parameter list."""
    parameters = [part.strip() for part in text.split(",") if part.strip()]
    kinds = inspect.Parameter
    made = []
    for parameter in parameters:
        name, _, default = parameter.partition("=")
        if name.startswith("**"):
            made.append(kinds(name[2:], kinds.VAR_KEYWORD))
        else:
            made.append(
                kinds(
                    name, kinds.POSITIONAL_OR_KEYWORD, default=default if default else inspect.Parameter.empty
                )
            )
    return inspect.Signature(made)


MANIFEST: Mapping[str, inspect.Signature | None] = {
    "is_available": signature(""),
    "device_count": signature(""),
    "current_device": signature(""),
    "set_device": signature("device"),
    "current_stream": signature("device=None"),
    "set_stream": signature("stream"),
    "synchronize": signature("device=None"),
    "mem_get_info": signature("device=None"),
    "musart": signature(""),
    "Stream": signature("device=None, priority=0, **kwargs"),
    "Stream.wait_event": signature("self, event"),
    "Stream.wait_stream": signature("self, stream"),
    "Stream.synchronize": signature("self"),
    "Stream.musa_stream": None,
    "Stream.device_index": None,
    "Event": signature("enable_timing=False, blocking=False, interprocess=False"),
    "Event.record": signature("self, stream=None"),
    "Event.query": signature("self"),
    "Event.synchronize": signature("self"),
    "Event.elapsed_time": signature("self, end_event"),
}


class Runtime:
    """`torch.musa.musart()`: page-locks by address, and remembers what it locked and on which device."""

    def __init__(self, module: Any) -> None:
        self.result = 0
        self.locked: dict[int, int] = {}
        self.unlocked_on: list[int] = []
        self._module = module

    def musaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.result == 0:
            self.locked[address] = nbytes
        return self.result

    def musaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        self.unlocked_on.append(self._module.current_device())
        return 0


@pytest.fixture
def stub(make_stub: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    # The platform builds device names, which torch knows only once torch_musa is there.
    original = torch.device

    class Device:
        def __new__(cls, kind: str, index: int | None = None) -> Any:
            return (kind, index) if kind == "musa" else original(kind, index)

    monkeypatch.setattr(torch, "device", Device)
    return make_stub("musa", MANIFEST)


@pytest.fixture
def runtime(stub: Any) -> Runtime:
    made = Runtime(stub)
    stub.musart = lambda: made
    return made


def test_only_recorded_names_are_used(
    stub: Any, use_everything: Callable[[Any, torch.device], None], poisoned_cuda: None
) -> None:
    use_everything(MUSA(), DEVICE)


def test_a_stub_refuses_what_was_not_recorded(stub: Any) -> None:
    with pytest.raises(AttributeError, match="Graph"):
        stub.Graph()
    with pytest.raises(TypeError):
        stub.Event(external=True)


def test_events_honour_blocking(stub: Any) -> None:
    seen: list[dict[str, bool]] = []
    stub.Event = lambda **options: seen.append(options)
    MUSA().new_event(timing=True, blocking=True)
    assert seen == [{"enable_timing": True, "blocking": True}]


def test_a_stream_of_another_family_never_reaches_an_event(stub: Any) -> None:
    platform = MUSA()
    event, foreign = platform.new_event(), torch.cpu.Stream()
    stub.calls.clear()
    for use in (
        lambda: platform.record(event, foreign),
        lambda: platform.wait_event(foreign, event),
        lambda: platform.wait_stream(platform.new_stream(DEVICE), foreign),
        lambda: platform.use_stream(foreign),
        lambda: platform.stream_handle(foreign),
    ):
        with pytest.raises(ValueError, match="not a stream of musa; convert it with as_native"):
            use()
    assert "Event.record" not in stub.calls


def test_blending_is_off_until_it_is_shown_to_work(runtime: Runtime) -> None:
    features = MUSA().features
    assert features.layerwise
    assert not features.blending
    assert features.host_register
    assert not features.batch_copy


def test_memory_is_registered_through_the_runtime(runtime: Runtime) -> None:
    platform, memory = MUSA(), torch.zeros(16, dtype=torch.uint8)
    assert platform.host_register(memory)
    assert runtime.locked == {memory.data_ptr(): 16}
    platform.host_unregister(memory)
    assert runtime.locked == {}


@pytest.mark.parametrize("device", [0, 1])
def test_memory_is_unregistered_on_the_device_it_was_registered_on(
    stub: Any, runtime: Runtime, device: int
) -> None:
    platform, memory = MUSA(), torch.zeros(16, dtype=torch.uint8)
    stub.set_device(device)
    assert platform.host_register(memory)
    stub.set_device(0)
    stub.calls.clear()
    platform.host_unregister(memory)
    assert runtime.unlocked_on == [device]
    assert stub.current_device() == 0
    assert stub.calls.count("set_device") == (0 if device == 0 else 2)


def test_odd_sizes_are_locked_exactly_and_unlocked_when_dropped(runtime: Runtime) -> None:
    memory = MUSA().alloc_pinned(5000)
    assert memory.data_ptr() % 4096 == 0
    assert runtime.locked == {memory.data_ptr(): 5000}
    view = memory[7:11]
    del memory
    assert len(runtime.locked) == 1
    del view
    assert runtime.locked == {}


def test_memory_that_cannot_be_locked_says_what_to_lower(runtime: Runtime) -> None:
    runtime.result = 2
    with pytest.raises(MemoryError, match=r"5000 bytes .*host memory.*max_local_cpu_size"):
        MUSA().alloc_pinned(5000)
    assert not MUSA().host_register(torch.zeros(16, dtype=torch.uint8))


def test_a_release_without_registering_has_not_the_feature(stub: Any) -> None:
    stub.musart = lambda: object()
    assert not MUSA().features.host_register
    assert not MUSA().host_register(torch.zeros(16, dtype=torch.uint8))
