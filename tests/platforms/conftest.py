"""Device modules made of recorded signatures, for platforms whose hardware is not here."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from lwkv.platforms import registry

BEHAVIOUR: dict[str, Callable[[], Any]] = {
    "is_available": lambda: True,
    "device_count": lambda: 2,
    "mem_get_info": lambda: (3, 7),
    "Event.query": lambda: True,
    "Event.elapsed_time": lambda: 1.5,
}
ATTRIBUTES = {"device_index": property(lambda stream: stream.index)}  # 0xBEEF stands for all others


class CurrentOfThread(threading.local):
    """The current device of a thread and its current stream on every device used so far."""

    def __init__(self) -> None:
        self.device = 1
        self.streams: dict[int, Any] = {}


class StubModule:
    """A device module with exactly the functions, classes and signatures given; anything else raises.

    Methods are named `Class.method`, attributes of objects `Class.attribute` with the signature None.
    `calls` lists what was called, in order. Every thread starts on device 1; making a stream current makes
    its device current.
    """

    def __init__(self, name: str, signatures: Mapping[str, inspect.Signature | None]) -> None:
        self._name, self._signatures = name, signatures
        self.calls: list[str] = []
        self.Stream = self._stream_class = self._make_class("Stream")
        self.Event = self._make_class("Event")
        self._current = CurrentOfThread()
        self._first_streams = [self._make_first(index) for index in range(2)]

    def __getattr__(self, name: str) -> Any:
        if name not in self._signatures:
            raise AttributeError(f"torch.{self._name} has no {name!r}")
        return getattr(self, f"_do_{name}", lambda *rest, **options: self._check(name, *rest, **options))

    def _do_current_device(self, *arguments: Any, **options: Any) -> int:
        self._check("current_device", *arguments, **options)
        return self._current.device

    def _do_set_device(self, *arguments: Any, **options: Any) -> None:
        self._current.device = self._index_in("set_device", *arguments, **options)

    def _do_current_stream(self, *arguments: Any, **options: Any) -> Any:
        index = self._index_in("current_stream", *arguments, **options)
        return self._current.streams.get(index, self._first_streams[index])

    def _do_set_stream(self, *arguments: Any, **options: Any) -> None:
        self._check("set_stream", *arguments, **options)
        (stream,) = self._bind("set_stream", *arguments, **options).values()
        self._current.device = stream.index
        self._current.streams[stream.index] = stream

    def _check(self, name: str, *arguments: Any, **options: Any) -> Any:
        self._bind(name, *arguments, **options)
        self.calls.append(name)
        return BEHAVIOUR.get(name, lambda: None)()

    def _bind(self, name: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        signature = self._signatures[name]
        assert signature is not None
        return signature.bind(*arguments, **options).arguments

    def _index_in(self, name: str, *arguments: Any, **options: Any) -> int:
        """The device that a call names by index or device, or else the current one."""
        self._check(name, *arguments, **options)
        device = self._bind(name, *arguments, **options).get("device")
        index = device if isinstance(device, int) else getattr(device, "index", None)
        return self._current.device if index is None else index

    def _make_first(self, index: int) -> Any:
        stream = object.__new__(self._stream_class)
        stream.index = index
        return stream

    def _make_class(self, name: str) -> type:
        def make(this: Any, *arguments: Any, **options: Any) -> None:
            this.index = self._index_in(name, *arguments, **options)

        members: dict[str, Any] = {"__init__": make}
        for known, signature in self._signatures.items():
            owner, _, member = known.partition(".")
            if owner == name and member:
                members[member] = self._method(known) if signature else ATTRIBUTES.get(member, 0xBEEF)
        return type(name, (), members)

    def _method(self, name: str) -> Callable[..., Any]:
        def method(this: object, *arguments: Any, **options: Any) -> Any:
            return self._check(name, this, *arguments, **options)

        return method


@pytest.fixture
def make_stub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StubModule]:
    """Put a StubModule in the place of a torch device module, with a fresh registry."""
    monkeypatch.setattr(registry, "_opened", {})

    def make(name: str, signatures: Mapping[str, inspect.Signature | None]) -> StubModule:
        stub = StubModule(name, signatures)
        monkeypatch.setattr(torch, name, stub, raising=False)
        return stub

    return make


@pytest.fixture
def use_everything() -> Callable[[Any, torch.device], None]:
    """Call every method of an accelerator's platform but those that need its memory."""

    def use(platform: Any, device: torch.device) -> None:
        assert platform.is_available()
        assert platform.device_count() == 2
        assert platform.current_device() == torch.device(platform.device_type, 1)
        platform.set_device(device)
        stream, other = platform.new_stream(device), platform.new_stream(device, high_priority=True)
        assert platform.as_native(stream, device) is stream
        event = platform.new_event()
        start, end = platform.new_event(timing=True), platform.new_event(blocking=True)
        platform.record(event, stream)
        platform.wait_event(other, event)
        platform.wait_stream(platform.current_stream(device), stream)
        with platform.use_stream(stream):
            pass
        ran: list[int] = []
        platform.launch(stream, lambda: ran.append(1))
        assert ran == [1]
        assert platform.query(event)
        platform.synchronize_event(event)
        platform.synchronize_stream(stream)
        platform.synchronize_device(device)
        platform.d2h_fence(stream, event)
        platform.d2h_fence(stream, event, other)
        assert platform.elapsed_ms(start, end) == 1.5
        assert platform.stream_handle(stream) == 0xBEEF
        assert platform.mem_info(device) == (3, 7)
        platform.close()

    return use


@pytest.fixture
def poisoned_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make any use of torch.cuda an error."""

    class Poison:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"torch.cuda.{name} was used")

    monkeypatch.setattr(torch, "cuda", Poison())
