"""torch's C functions for CUDA streams, by functions that stand for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lwkv.platforms.cuda import CUDA
from lwkv.platforms.cuda_streams import CudaStreams

FIRST = {0: (0, 0, 1), 1: (0, 1, 1)}  # stream id, device index, device type


class StreamsOfThread:
    """A thread's device and streams. As in torch, setting a stream makes its device current."""

    def __init__(self) -> None:
        self.device = 0
        self.streams = dict(FIRST)
        self.made: list[int] = []

    def set(self, *, stream_id: int, device_index: int, device_type: int) -> None:
        self.device = device_index
        self.streams[device_index] = (stream_id, device_index, device_type)

    def make(self, index: int) -> Any:
        self.made.append(index)
        return stream_of(*self.streams[index])


def stream_of(stream_id: int, device_index: int, device_type: int) -> Any:
    return SimpleNamespace(stream_id=stream_id, device_index=device_index, device_type=device_type)


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> StreamsOfThread:
    made = StreamsOfThread()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: made.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda at: made.streams[at], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setStream", made.set, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", made.make)
    monkeypatch.setattr(torch.cuda, "Stream", SimpleNamespace)
    return made


def test_the_current_stream_is_the_one_set_last_on_its_device(thread: StreamsOfThread) -> None:
    streams, here, there = CudaStreams(), stream_of(7, 0, 1), stream_of(7, 1, 1)
    for stream in (here, there):
        streams.set_stream(stream)
        assert streams.current_device() == stream.device_index
    assert (streams.current_stream(0), streams.current_stream(1)) == (here, there)


def test_a_stream_object_is_made_once(thread: StreamsOfThread) -> None:
    streams, other = CudaStreams(), stream_of(7, 0, 1)
    first = streams.current_stream(0)
    streams.set_stream(other)
    assert streams.current_stream(0) == other
    streams.set_stream(first)
    assert streams.current_stream(0) is first
    assert thread.made == [0, 0]


def test_the_platform_switches_streams_and_devices_by_them(thread: StreamsOfThread) -> None:
    platform, there = CUDA(), stream_of(7, 1, 1)
    with platform.use_stream(there):
        assert thread.device == 1
        assert platform.current_stream(torch.device("cuda", 1)) == there
        with platform.use_stream(stream_of(3, 0, 1)):
            assert (thread.device, thread.streams[0][0]) == (0, 3)
        assert (thread.device, thread.streams[1][0]) == (1, 7)
    assert (thread.device, thread.streams) == (0, FIRST)


def test_a_torch_without_the_c_functions_is_asked_through_its_module(
    thread: StreamsOfThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CudaStreams.are_there()
    monkeypatch.delattr(torch._C, "_cuda_setStream")
    assert not CudaStreams.are_there()
    assert CUDA().streams is torch.cuda
