"""Streams and events of the simulated device are asynchronous, and ordered by nothing but recorded events."""

from __future__ import annotations

import os
import threading
import warnings
from types import ModuleType

import pytest
import torch

DEVICE = torch.device("musa", 0)


def numbers(count: int = 5) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=torch.int32)


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_a_non_blocking_copy_returns_before_it_is_done(late: None, pinned: bool) -> None:
    source = numbers().pin_memory() if pinned else numbers()
    target = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    target.copy_(source, non_blocking=True)
    event = torch.musa.current_stream().record_event()
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert target.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_a_source_that_is_overwritten_early_is_read_late(late: None, pinned: bool) -> None:
    source = numbers().pin_memory() if pinned else numbers()
    target = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    target.copy_(source, non_blocking=True)
    source.fill_(-7)
    assert target.tolist() == [-7] * 5


def test_a_host_target_is_stale_until_it_is_waited_for(late: None) -> None:
    source = numbers().to(DEVICE)
    target = torch.zeros(5, dtype=torch.int32).pin_memory()
    target.copy_(source, non_blocking=True)
    assert target.tolist() == [0] * 5
    torch.musa.current_stream().synchronize()
    assert target.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("waits", [True, False])
def test_another_stream_sees_a_copy_only_after_waiting_for_it(simulator: ModuleType, waits: bool) -> None:
    writer, reader = torch.musa.Stream(), torch.musa.Stream()
    target = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    torch.musa.synchronize()
    simulator.set_late(True, writer)
    with torch.musa.stream(writer):
        target.copy_(numbers().pin_memory(), non_blocking=True)
    if waits:
        reader.wait_event(writer.record_event())
    with torch.musa.stream(reader):
        assert target.tolist() == ([1, 2, 3, 4, 5] if waits else [0] * 5)
    torch.musa.synchronize()


def test_need_passes_through_streams_that_wait_for_each_other(late: None) -> None:
    streams = [torch.musa.Stream() for _ in range(4)]
    target = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    streams[0].wait_stream(torch.musa.current_stream())
    for number, stream in enumerate(streams):
        if number:
            stream.wait_stream(streams[number - 1])
        with torch.musa.stream(stream):
            target.mul_(2).add_(1)
    streams[-1].synchronize()
    assert target.tolist() == [15] * 4


def test_a_wait_keeps_the_record_it_was_given(late: None) -> None:
    first, second, waiter = (torch.musa.Stream() for _ in range(3))
    event = torch.musa.Event()
    event.record(first)
    waiter.wait_event(event)
    torch.zeros(3, device=DEVICE)
    with torch.musa.stream(second):
        busy = torch.zeros(3, device=DEVICE)
    event.record(second)
    waiter.synchronize()
    assert not event.query()
    event.synchronize()
    assert busy.tolist() == [0.0] * 3


def test_events_that_were_never_recorded_are_done() -> None:
    event = torch.musa.Event()
    assert event.query()
    event.synchronize()
    torch.musa.current_stream().wait_event(event)


def test_timing_events_see_the_delay_of_what_is_between_them(simulator: ModuleType) -> None:
    start, end = torch.musa.Event(enable_timing=True), torch.musa.Event(enable_timing=True)
    target = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    torch.musa.synchronize()
    simulator.set_delay(0.02)
    start.record()
    target.add_(1)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 20
    assert end.elapsed_time(start) <= -20


def test_times_of_unfinished_or_untimed_events_are_refused(late: None) -> None:
    start, end = torch.musa.Event(enable_timing=True), torch.musa.Event(enable_timing=True)
    start.record()
    torch.zeros(3, device=DEVICE)
    end.record()
    with pytest.raises(RuntimeError, match="completed"):
        start.elapsed_time(end)
    with pytest.raises(RuntimeError, match="enable_timing"):
        start.elapsed_time(torch.musa.Event())


def test_events_take_only_streams_of_torch_musa() -> None:
    generic = torch.Stream(DEVICE)
    event = torch.musa.Event()
    with pytest.raises(TypeError, match=r"torch\.musa\.Stream"):
        event.record(generic)
    with pytest.raises(TypeError, match=r"torch\.musa\.Stream"):
        event.wait(generic)
    event.record(
        torch.musa.Stream(
            stream_id=generic.stream_id, device_index=generic.device_index, device_type=generic.device_type
        )
    )


def test_generic_events_and_streams_are_the_same_queues(late: None) -> None:
    stream = torch.Stream(DEVICE)
    target = torch.zeros(2, device=DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())
    with torch.musa.stream(torch.musa.Stream(stream_id=stream.stream_id, device_index=0, device_type=20)):
        target.add_(3)
    event = stream.record_event()
    assert not event.query()
    torch.accelerator.current_stream().wait_event(event)
    assert target.tolist() == [3.0, 3.0]


def test_the_current_stream_and_device_belong_to_a_thread() -> None:
    seen = []
    with torch.musa.device(1), torch.musa.stream(torch.musa.Stream()):
        thread = threading.Thread(
            target=lambda: seen.append((torch.musa.current_device(), torch.musa.current_stream(1).stream_id))
        )
        thread.start()
        thread.join()
        assert torch.musa.current_device() == 1
        assert torch.musa.current_stream().stream_id != 0
    assert seen == [(0, 0)]
    assert torch.musa.current_device() == 0


def test_a_stream_context_sets_the_device_and_restores_both() -> None:
    before = torch.musa.current_stream(1)
    inside = torch.musa.Stream(1)
    with torch.musa.stream(inside):
        assert torch.musa.current_device() == 1
        assert torch.musa.current_stream() == inside
    assert torch.musa.current_device() == 0
    assert torch.musa.current_stream(1) == before


def test_the_pool_hands_its_streams_out_in_turn() -> None:
    streams = [torch.musa.Stream() for _ in range(33)]
    urgent = torch.musa.Stream(priority=-1)
    assert len({stream.musa_stream for stream in streams[:32]} | {urgent.musa_stream}) == 33
    assert streams[32] == streams[0]


def test_an_error_of_queued_work_is_raised_by_the_next_wait_and_once(late: None) -> None:
    source = torch.zeros(3, device=DEVICE)
    torch.index_select(source, 0, torch.tensor([5], device=DEVICE))
    with pytest.raises(IndexError):
        torch.musa.current_stream().synchronize()
    torch.musa.current_stream().synchronize()


def test_synchronize_empties_every_stream_of_one_device(late: None) -> None:
    events = []
    for device in (0, 1):
        with torch.musa.stream(torch.musa.Stream(device)) as _:
            torch.zeros(3, device=torch.device("musa", device))
            events.append(torch.musa.current_stream().record_event())
    torch.musa.synchronize(0)
    assert [event.query() for event in events] == [True, False]


def test_a_forked_child_is_refused() -> None:
    torch.zeros(2, device=DEVICE).tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            torch.zeros(2, device=DEVICE)
        except RuntimeError as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
