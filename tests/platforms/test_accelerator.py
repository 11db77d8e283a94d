"""What the accelerators share, over a stub with the signatures of torch.xpu."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lwkv.platforms import CopyBatch, Stream
from lwkv.platforms.xpu import XPU

HERE, THERE = torch.device("xpu", 1), torch.device("xpu", 0)


@pytest.fixture
def stub(make_stub: Callable[..., Any]) -> Any:
    functions = ("current_device", "set_device", "current_stream", "set_stream", "synchronize")
    found = {name: inspect.signature(getattr(torch.xpu, name)) for name in functions}
    stream = inspect.signature(lambda device=None, priority=0, **kwargs: None)
    return make_stub("xpu", {**found, "Stream": stream, "Stream.device_index": None})


@pytest.fixture
def platform(stub: Any) -> XPU:
    return XPU()


def state(platform: XPU) -> tuple[torch.device, Stream, Stream]:
    """The thread's current device and its current stream on both devices."""
    return platform.current_device(), platform.current_stream(THERE), platform.current_stream(HERE)


def in_thread(work: Callable[[], object]) -> object:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def test_a_device_without_index_is_the_current_one(platform: XPU) -> None:
    here, there = platform.current_stream(HERE), platform.current_stream(THERE)
    assert here is not there
    assert platform.current_stream(torch.device("xpu")) is here
    platform.set_device(THERE)
    assert platform.current_stream(torch.device("xpu")) is there
    assert platform.current_stream(HERE) is here


def test_a_stream_and_its_device_are_current_inside_and_the_former_ones_after(platform: XPU) -> None:
    before = state(platform)
    for device in (HERE, THERE):
        stream = platform.new_stream(device)
        with platform.use_stream(stream):
            assert platform.current_device() == device
            assert platform.current_stream(device) is stream
        assert state(platform) == before


def test_an_error_inside_restores_stream_and_device(platform: XPU) -> None:
    before = state(platform)
    for device in (HERE, THERE):
        with pytest.raises(ZeroDivisionError), platform.use_stream(platform.new_stream(device)):
            raise ZeroDivisionError
        assert state(platform) == before


def test_nested_streams_end_in_turn_over_several_devices(platform: XPU) -> None:
    streams = [platform.new_stream(device) for device in (HERE, THERE, THERE, HERE)]
    states, contexts = [state(platform)], [platform.use_stream(stream) for stream in streams]
    for context in contexts:
        context.__enter__()
        states.append(state(platform))
    assert [now[0] for now in states] == [HERE, HERE, THERE, THERE, HERE]
    for context in reversed(contexts):
        assert state(platform) == states.pop()
        context.__exit__(None, None, None)
    assert [state(platform)] == states


def test_a_device_changed_inside_is_changed_back(platform: XPU) -> None:
    before = state(platform)
    for device, other in ((HERE, THERE), (THERE, HERE)):
        with platform.use_stream(platform.new_stream(device)):
            platform.set_device(other)
        assert state(platform) == before


def test_what_counts_is_the_device_at_entry(platform: XPU) -> None:
    context = platform.use_stream(platform.new_stream(HERE))
    platform.set_device(THERE)
    before = state(platform)
    with context:
        assert platform.current_device() == HERE
    assert state(platform) == before


def test_other_threads_keep_their_streams(platform: XPU) -> None:
    before = state(platform)
    with platform.use_stream(platform.new_stream(THERE)):
        assert in_thread(lambda: state(platform)) == before


def test_a_stream_of_the_current_device_takes_four_calls(platform: XPU, stub: Any) -> None:
    stream = platform.new_stream(HERE)
    stub.calls.clear()
    with platform.use_stream(stream):
        assert stub.calls == ["current_device", "current_stream", "set_stream"]
    assert stub.calls[3:] == ["set_stream"]


def test_every_kind_of_stream_is_looked_at_before_it_is_used(platform: XPU, stub: Any) -> None:
    class Special(stub.Stream):
        pass

    for own in (platform.new_stream(HERE), Special(HERE), platform.new_stream(THERE), Special(THERE)):
        with platform.use_stream(own):
            assert platform.current_stream(platform.current_device()) is own
        for foreign in (torch.cpu.Stream(), object(), None, type(own)):
            with pytest.raises(ValueError, match="not a stream of xpu; convert it with as_native"):
                platform.use_stream(foreign)


def test_streams_made_before_a_vendor_replaced_the_class_are_still_taken(platform: XPU, stub: Any) -> None:
    old = platform.new_stream(HERE)
    with platform.use_stream(old):
        pass
    stub.Stream = type("Replaced", (stub.Stream,), {})
    for stream in (old, platform.new_stream(HERE)):
        with platform.use_stream(stream):
            assert platform.current_stream(HERE) is stream


def make_batch(slab: torch.Tensor) -> CopyBatch:
    zeros, steps = np.zeros(2, np.int64), np.arange(2)
    return CopyBatch([slab], zeros, steps * 9, steps * 9 + slab.data_ptr(), steps * 7 + 1, zeros + 4)


def test_a_batch_is_a_loop_of_copies(platform: XPU) -> None:
    slab, buffer = torch.arange(1, 23, dtype=torch.uint8), torch.zeros(13, dtype=torch.uint8)
    platform.load_batch(buffer, make_batch(slab), platform.new_stream(HERE))
    assert buffer.tolist() == [0, 1, 2, 3, 4, 0, 0, 0, 10, 11, 12, 13, 0]
    platform.save_batch(buffer + 100, make_batch(slab), platform.new_stream(HERE))
    assert slab[:14].tolist() == [101, 102, 103, 104, 5, 6, 7, 8, 9, 110, 111, 112, 113, 14]


def test_a_batch_outside_its_slab_or_buffer_is_refused_before_a_byte_moves(platform: XPU) -> None:
    slab, buffer = torch.arange(1, 23, dtype=torch.uint8), torch.zeros(13, dtype=torch.uint8)
    good, stream = make_batch(slab), platform.new_stream(HERE)
    bad = (
        good._replace(device_offsets=good.device_offsets + 2),
        good._replace(sizes=good.sizes + 10),
        good._replace(host_addresses=good.host_addresses + 1),
        good._replace(sizes=good.sizes.astype(np.int32)),
    )
    for batch in bad:
        for copy in (platform.load_batch, platform.save_batch):
            with pytest.raises(ValueError, match=r"keep it positive and inside both|packed int64"):
                copy(buffer, batch, stream)
    assert not buffer.any()
    assert slab.tolist() == list(range(1, 23))


def lock(monkeypatch: pytest.MonkeyPatch, memory: torch.Tensor) -> None:
    """Let torch answer for `memory` as it does: by where a tensor's storage begins, not the tensor."""
    start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    monkeypatch.setattr(
        torch.Tensor, "is_pinned", lambda tensor: start <= tensor.untyped_storage().data_ptr() < end
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_memory_is_pinned_where_it_lies_not_where_its_storage_begins(
    platform: XPU, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    whole = torch.zeros(960, dtype=torch.uint8).view(dtype)
    memory = whole[24:72]
    lock(monkeypatch, memory)
    assert platform.is_pinned(memory)
    assert platform.is_pinned(memory[5:7])
    for outside in (whole, whole[23:72], whole[24:73], whole[:24], whole[72:]):
        assert not platform.is_pinned(outside)
    lock(monkeypatch, whole[:24])
    assert platform.is_pinned(whole[:24])
    assert not platform.is_pinned(memory)


def test_memory_of_no_bytes_is_not_pinned(platform: XPU) -> None:
    assert not platform.is_pinned(torch.zeros(0, dtype=torch.uint8))
