"""The contract of a platform; `pytest --platform NAME` runs it on that device."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lwkv.platforms import CopyBatch, Platform, Stream
from lwkv.platforms.cpu_stream import WorkerStream

BUSY_SIDE = 2048
ODD_SIZES = [1, 3, 255, 4097, 70001]


def numbered(nbytes: int, start: int = 0) -> torch.Tensor:
    """Bytes that tell their neighbours apart."""
    return (torch.arange(start, start + nbytes) * 7 + 3).remainder(251).to(torch.uint8)


def pinned(platform: Platform, values: torch.Tensor) -> torch.Tensor:
    memory = platform.alloc_pinned(values.numel())
    memory.copy_(values)
    return memory


def on_device(platform: Platform, values: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = values.to(device, copy=True)
    platform.synchronize_device(device)
    return tensor


def read(platform: Platform, tensor: torch.Tensor) -> torch.Tensor:
    platform.synchronize_device(tensor.device)
    return tensor.cpu()


def keep_busy(platform: Platform, stream: Stream, device: torch.device) -> None:
    """Put work in the way, so that what overtakes it shows: a late stream works only when waited for."""
    if isinstance(stream, WorkerStream):
        stream.late = True
    if device.type == "cpu":
        return None
    square = on_device(platform, torch.ones(BUSY_SIDE, BUSY_SIDE), device)
    return platform.launch(stream, lambda: [square @ square for _ in range(20)])


@pytest.fixture(autouse=True)
def nothing_in_the_way_of_late_streams(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.config.getoption("--musa-streams", default=None) == "late":
        monkeypatch.setattr(f"{__name__}.BUSY_SIDE", 2)


def fill(platform: Platform, stream: Stream, tensor: torch.Tensor, value: int) -> None:
    platform.launch(stream, lambda: tensor.fill_(value))


def make_batch(slabs: list[torch.Tensor], runs: list[tuple[int, int, int, int]]) -> CopyBatch:
    """A batch of (slab, host offset, device offset, size) runs."""
    slab_of, host, device, sizes = np.array(runs, np.int64).reshape(-1, 4).T.copy()
    starts = np.array([slab.data_ptr() for slab in slabs], np.int64)
    return CopyBatch(slabs, slab_of, host, starts[slab_of] + host, device, sizes)


def neighbouring(count: int) -> list[tuple[int, int, int, int]]:
    """Runs of odd sizes that follow each other on both sides, over two slabs."""
    sizes = [5 + run % 3 for run in range(count)]
    starts = [sum(sizes[:run]) for run in range(count)]
    return [(0, 11 + start, 3 + start, size) for start, size in zip(starts, sizes, strict=True)]


def scattered(count: int) -> list[tuple[int, int, int, int]]:
    """Runs with gaps between them, in reverse order on the host, over two slabs."""
    return [(run % 2, 13 * (count - run), 17 * run + 2, 1 + run % 9) for run in range(count)]


def expected_load(buffer: torch.Tensor, batch: CopyBatch) -> torch.Tensor:
    result = buffer.clone()
    for slab, host, at, size in zip(
        batch.slab_of, batch.host_offsets, batch.device_offsets, batch.sizes, strict=True
    ):
        result[at : at + size] = batch.slabs[slab][host : host + size]
    return result


def expected_save(slabs: list[torch.Tensor], buffer: torch.Tensor, batch: CopyBatch) -> list[torch.Tensor]:
    results = [slab.clone() for slab in slabs]
    for slab, host, at, size in zip(
        batch.slab_of, batch.host_offsets, batch.device_offsets, batch.sizes, strict=True
    ):
        results[slab][host : host + size] = buffer[at : at + size]
    return results


def in_thread(work: Callable[[], object]) -> list[object]:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results


def test_the_device_is_one_of_the_platforms(platform: Platform, device: torch.device) -> None:
    assert platform.is_available()
    assert platform.device_count() >= 1
    assert device.type == platform.device_type
    assert torch.empty(1, device=device).device == device


def test_a_stream_runs_its_work_in_order(platform: Platform, device: torch.device) -> None:
    stream = platform.new_stream(device)
    tensor = on_device(platform, torch.zeros(33, dtype=torch.uint8), device)
    seen = [platform.alloc_pinned(33) for _ in range(3)]
    for value, memory in enumerate(seen, start=1):
        keep_busy(platform, stream, device)
        fill(platform, stream, tensor, value)
        platform.copy_async(memory, tensor, stream)
    platform.synchronize_stream(stream)
    assert [memory.tolist() for memory in seen] == [[1] * 33, [2] * 33, [3] * 33]


@pytest.mark.parametrize("swapped", [False, True])
def test_an_event_orders_two_streams_in_both_directions(
    platform: Platform, device: torch.device, swapped: bool
) -> None:
    first, second = platform.new_stream(device), platform.new_stream(device, high_priority=True)
    if swapped:
        first, second = second, first
    tensor = on_device(platform, torch.zeros(4097, dtype=torch.uint8), device)
    seen, event = platform.alloc_pinned(4097), platform.new_event()
    keep_busy(platform, first, device)
    fill(platform, first, tensor, 9)
    platform.record(event, first)
    platform.wait_event(second, event)
    platform.copy_async(seen, tensor, second)
    platform.synchronize_stream(second)
    assert seen.eq(9).all()


def test_an_event_orders_the_current_stream_and_another(platform: Platform, device: torch.device) -> None:
    current, other = platform.current_stream(device), platform.new_stream(device)
    tensor = on_device(platform, torch.zeros(65, dtype=torch.uint8), device)
    event, seen = platform.new_event(), platform.alloc_pinned(65)
    keep_busy(platform, current, device)
    fill(platform, current, tensor, 1)
    platform.record(event, current)
    platform.wait_event(other, event)
    keep_busy(platform, other, device)
    platform.launch(other, lambda: tensor.add_(4))
    platform.record(event, other)
    platform.wait_event(current, event)
    platform.copy_async(seen, tensor, current)
    platform.synchronize_stream(current)
    assert seen.eq(5).all()


def test_wait_stream_waits_for_all_that_the_other_holds(platform: Platform, device: torch.device) -> None:
    first, second = platform.new_stream(device), platform.new_stream(device)
    tensor = on_device(platform, torch.zeros(65, dtype=torch.uint8), device)
    seen = platform.alloc_pinned(65)
    keep_busy(platform, first, device)
    fill(platform, first, tensor, 6)
    platform.wait_stream(second, first)
    platform.copy_async(seen, tensor, second)
    platform.synchronize_stream(second)
    assert seen.eq(6).all()


def test_a_wait_takes_the_latest_record(platform: Platform, device: torch.device) -> None:
    first, second = platform.new_stream(device), platform.new_stream(device)
    tensor = on_device(platform, torch.zeros(65, dtype=torch.uint8), device)
    seen, event = platform.alloc_pinned(65), platform.new_event()
    for value in (1, 2):
        keep_busy(platform, first, device)
        fill(platform, first, tensor, value)
        platform.record(event, first)
    platform.wait_event(second, event)
    platform.copy_async(seen, tensor, second)
    platform.synchronize_stream(second)
    assert seen.eq(2).all()


def test_a_wait_keeps_the_record_it_took(platform: Platform, device: torch.device) -> None:
    first, second = platform.new_stream(device), platform.new_stream(device)
    event, done = platform.new_event(), platform.new_event()
    platform.record(event, first)
    platform.wait_event(second, event)
    platform.record(done, second)
    platform.wait_event(first, done)
    platform.record(event, first)
    platform.synchronize_event(event)
    assert platform.query(done)


def test_a_synchronized_event_is_reached(platform: Platform, device: torch.device) -> None:
    stream, event = platform.new_stream(device), platform.new_event(blocking=True)
    keep_busy(platform, stream, device)
    platform.record(event, stream)
    platform.synchronize_event(event)
    assert platform.query(event)


def test_a_thousand_events_can_be_used_again(platform: Platform, device: torch.device) -> None:
    first, second = platform.new_stream(device), platform.new_stream(device)
    tensor = on_device(platform, torch.zeros(3, dtype=torch.int32), device)
    events = [platform.new_event() for _ in range(1000)]
    for waiter, other in ((first, second), (second, first)):
        for event in events:
            platform.launch(other, lambda: tensor.add_(1))
            platform.record(event, other)
            platform.wait_event(waiter, event)
    platform.synchronize_device(device)
    assert all(platform.query(event) for event in events)
    assert read(platform, tensor).tolist() == [2000, 2000, 2000]


@pytest.mark.parametrize("nbytes", ODD_SIZES)
def test_a_copy_there_and_back_is_exact(platform: Platform, device: torch.device, nbytes: int) -> None:
    stream = platform.new_stream(device)
    there, back = pinned(platform, numbered(nbytes)), platform.alloc_pinned(nbytes)
    tensor = on_device(platform, torch.zeros(nbytes, dtype=torch.uint8), device)
    event = platform.new_event()
    platform.copy_async(tensor, there, stream)
    platform.copy_async(back, tensor, stream)
    platform.record(event, stream)
    platform.d2h_fence(stream, event)
    assert torch.equal(back, numbered(nbytes))


def test_a_copy_keeps_every_bit_of_a_float(platform: Platform, device: torch.device) -> None:
    bits = torch.tensor([0x7FC01234, -0x7FFFFFFF, 0x7F800001], dtype=torch.int32)
    there = pinned(platform, bits.view(torch.uint8)).view(torch.float32)
    tensor = on_device(platform, torch.zeros(3), device)
    platform.copy_async(tensor, there, platform.new_stream(device))
    assert torch.equal(read(platform, tensor).view(torch.int32), bits)


def test_a_copy_between_unlike_tensors_is_refused(platform: Platform, device: torch.device) -> None:
    stream, tensor = platform.new_stream(device), torch.zeros(4, device=device)
    with pytest.raises(ValueError, match="shape and dtype must be equal"):
        platform.copy_async(tensor, torch.zeros(5), stream)
    with pytest.raises(ValueError, match="shape and dtype must be equal"):
        platform.copy_async(tensor, torch.zeros(4, dtype=torch.int32), stream)
    with pytest.raises(ValueError, match="packed"):
        platform.copy_async(tensor, torch.zeros(8)[::2], stream)


def test_ordinary_host_memory_may_be_overwritten_right_after_the_call(
    platform: Platform, device: torch.device
) -> None:
    stream, source = platform.new_stream(device), numbered(70001)
    tensor = on_device(platform, torch.zeros(70001, dtype=torch.uint8), device)
    keep_busy(platform, stream, device)
    platform.copy_async(tensor, source, stream)
    source.zero_()
    assert torch.equal(read(platform, tensor), numbered(70001))


def test_ordinary_host_memory_is_complete_when_the_call_returns(
    platform: Platform, device: torch.device
) -> None:
    stream, back = platform.new_stream(device), torch.zeros(4097, dtype=torch.uint8)
    tensor = on_device(platform, numbered(4097), device)
    keep_busy(platform, stream, device)
    platform.copy_async(back, tensor, stream)
    assert torch.equal(back, numbered(4097))


@pytest.mark.parametrize("runs", [1, 2, 37])
@pytest.mark.parametrize("arrange", [neighbouring, scattered])
def test_a_loaded_batch_writes_its_runs_and_nothing_else(
    platform: Platform,
    device: torch.device,
    arrange: Callable[[int], list[tuple[int, int, int, int]]],
    runs: int,
) -> None:
    stream = platform.new_stream(device)
    slabs = [pinned(platform, numbered(599)), pinned(platform, numbered(733, start=599))]
    sentinels = torch.full((701,), 254, dtype=torch.uint8)
    buffer = on_device(platform, sentinels, device)
    batch = make_batch(slabs, arrange(runs))
    platform.load_batch(buffer, batch, stream)
    assert torch.equal(read(platform, buffer), expected_load(sentinels, batch))


@pytest.mark.parametrize("runs", [1, 2, 37])
@pytest.mark.parametrize("arrange", [neighbouring, scattered])
def test_a_saved_batch_writes_its_runs_and_nothing_else(
    platform: Platform,
    device: torch.device,
    arrange: Callable[[int], list[tuple[int, int, int, int]]],
    runs: int,
) -> None:
    stream, event = platform.new_stream(device), platform.new_event()
    sentinels = [torch.full((size,), 253, dtype=torch.uint8) for size in (599, 733)]
    slabs = [pinned(platform, slab) for slab in sentinels]
    buffer = on_device(platform, numbered(701), device)
    batch = make_batch(slabs, arrange(runs))
    platform.save_batch(buffer, batch, stream)
    platform.record(event, stream)
    platform.d2h_fence(stream, event)
    for slab, expected in zip(slabs, expected_save(sentinels, numbered(701), batch), strict=True):
        assert torch.equal(slab, expected)


def test_another_stream_writes_what_was_saved_only_when_it_is(
    platform: Platform, device: torch.device
) -> None:
    stream, other, event = platform.new_stream(device), platform.new_stream(device), platform.new_event()
    slab, source = pinned(platform, numbered(599)), numbered(701)
    buffer = on_device(platform, source, device)
    batch = make_batch([slab], neighbouring(37))
    (expected,) = expected_save([slab], source, batch)
    keep_busy(platform, stream, device)
    platform.save_batch(buffer, batch, stream)
    platform.record(event, stream)
    platform.d2h_fence(stream, event, other)
    fill(platform, other, buffer, 9)
    platform.synchronize_stream(other)
    platform.synchronize_stream(stream)
    assert torch.equal(slab, expected)


@pytest.mark.parametrize("runs", [2, 37])
def test_batches_keep_their_place_in_the_stream(platform: Platform, device: torch.device, runs: int) -> None:
    stream = platform.new_stream(device)
    slabs = [platform.alloc_pinned(599), platform.alloc_pinned(733)]
    buffer = on_device(platform, torch.zeros(701, dtype=torch.uint8), device)
    batch = make_batch(slabs, scattered(runs))
    keep_busy(platform, stream, device)
    fill(platform, stream, buffer, 5)
    platform.save_batch(buffer, batch, stream)
    fill(platform, stream, buffer, 6)
    platform.load_batch(buffer, batch, stream)
    loaded = read(platform, buffer)
    assert torch.equal(loaded, expected_load(torch.full((701,), 6, dtype=torch.uint8), batch))
    assert loaded.eq(5).sum() == batch.sizes.sum()


def test_a_stable_batch_can_be_loaded_again(platform: Platform, device: torch.device) -> None:
    stream, slab = platform.new_stream(device), pinned(platform, numbered(599))
    made = make_batch([slab], neighbouring(37))
    batch = CopyBatch(
        made.slabs,
        made.slab_of,
        made.host_offsets,
        made.host_addresses,
        made.device_offsets,
        made.sizes,
        True,
    )
    buffer = on_device(platform, torch.zeros(701, dtype=torch.uint8), device)
    for value in (1, 2):
        fill(platform, stream, buffer, value)
        platform.load_batch(buffer, batch, stream)
    assert torch.equal(read(platform, buffer), expected_load(torch.full((701,), 2, dtype=torch.uint8), batch))


def test_a_batch_without_runs_does_nothing(platform: Platform, device: torch.device) -> None:
    stream, slab = platform.new_stream(device), pinned(platform, numbered(9))
    buffer = on_device(platform, numbered(9), device)
    platform.load_batch(buffer, make_batch([slab], []), stream)
    platform.save_batch(buffer, make_batch([slab], []), stream)
    assert torch.equal(read(platform, buffer), numbered(9))


def test_a_batch_goes_through_the_current_stream_too(platform: Platform, device: torch.device) -> None:
    current = platform.current_stream(device)
    slabs = [pinned(platform, numbered(599)), pinned(platform, numbered(733))]
    buffer = on_device(platform, torch.zeros(701, dtype=torch.uint8), device)
    batch = make_batch(slabs, scattered(37))
    platform.load_batch(buffer, batch, current)
    assert torch.equal(read(platform, buffer), expected_load(torch.zeros(701, dtype=torch.uint8), batch))


def test_a_thread_that_never_touched_the_device_can_copy_batches(
    platform: Platform, device: torch.device
) -> None:
    stream = platform.new_stream(device)
    slabs = [pinned(platform, numbered(599)), pinned(platform, numbered(733))]
    buffer = on_device(platform, torch.zeros(701, dtype=torch.uint8), device)
    batch = make_batch(slabs, scattered(37))

    def load() -> bool:
        platform.load_batch(buffer, batch, stream)
        platform.synchronize_stream(stream)
        return True

    assert in_thread(load) == [True]
    assert torch.equal(read(platform, buffer), expected_load(torch.zeros(701, dtype=torch.uint8), batch))


def test_a_buffer_that_is_not_packed_bytes_is_refused(platform: Platform, device: torch.device) -> None:
    stream, slab = platform.new_stream(device), platform.alloc_pinned(64)
    batch = make_batch([slab], [(0, 0, 0, 4), (0, 8, 8, 4)])
    for buffer in (torch.zeros(64, device=device), torch.zeros(64, dtype=torch.uint8, device=device)[::2]):
        with pytest.raises(ValueError, match="packed uint8"):
            platform.load_batch(buffer, batch, stream)
        with pytest.raises(ValueError, match="packed uint8"):
            platform.save_batch(buffer, batch, stream)


@pytest.mark.parametrize("nbytes", [*ODD_SIZES, 8192])
def test_pinned_memory_is_aligned_and_page_locked(platform: Platform, nbytes: int) -> None:
    memory = platform.alloc_pinned(nbytes)
    assert (memory.dtype, memory.shape, memory.device.type) == (torch.uint8, (nbytes,), "cpu")
    assert memory.data_ptr() % 4096 == 0
    assert platform.is_pinned(memory)
    assert platform.is_pinned(memory[nbytes // 2 :])


@pytest.mark.parametrize("nbytes", [4097, 8192])
def test_pinned_memory_made_in_inference_mode_can_be_written_outside_of_it(
    platform: Platform, nbytes: int
) -> None:
    with torch.inference_mode():
        memory = platform.alloc_pinned(nbytes)
        page = memory.narrow(0, 3, 5)
    page.copy_(numbered(5))
    memory[:3].zero_()
    assert (memory.is_inference(), page.is_inference()) == (False, False)
    assert memory[:8].tolist() == [0, 0, 0, *numbered(5).tolist()]


def test_ordinary_memory_is_not_page_locked(platform: Platform) -> None:
    assert not platform.is_pinned(torch.zeros(70001, dtype=torch.uint8))


def test_pinned_memory_of_no_bytes_is_refused(platform: Platform) -> None:
    for nbytes in (0, -5):
        with pytest.raises(ValueError, match=f"got {nbytes} bytes"):
            platform.alloc_pinned(nbytes)


def test_more_pinned_memory_than_there_is_says_what_to_lower(platform: Platform) -> None:
    with pytest.raises(MemoryError, match=r"GiB\) of host memory.*max_local_cpu_size"):
        platform.alloc_pinned(1 << 60)


def test_work_goes_on_after_pinned_memory_ran_out(platform: Platform, device: torch.device) -> None:
    with pytest.raises(MemoryError):
        platform.alloc_pinned((1 << 60) + 1)
    stream, tensor = platform.new_stream(device), torch.zeros(9, dtype=torch.uint8, device=device)
    fill(platform, stream, tensor, 3)
    assert read(platform, tensor).eq(3).all()


def test_registered_memory_is_page_locked_until_unregistered(platform: Platform) -> None:
    ordinary = torch.zeros(1 << 20, dtype=torch.uint8)
    memory = ordinary[-ordinary.data_ptr() % 4096 :][:8192]
    assert platform.host_register(memory) == platform.features.host_register
    assert platform.is_pinned(memory) == platform.features.host_register
    assert platform.is_pinned(memory[4097:]) == platform.features.host_register
    assert not platform.is_pinned(ordinary)
    platform.host_unregister(memory)
    assert not platform.is_pinned(memory)


def test_the_current_stream_is_the_threads_own(platform: Platform, device: torch.device) -> None:
    before = platform.current_stream(device)
    stream = platform.new_stream(device)
    with platform.use_stream(stream):
        assert platform.current_stream(device) == stream
        assert in_thread(lambda: platform.current_stream(device) != stream) == [True]
    assert platform.current_stream(device) == before


def test_nested_streams_end_in_turn_also_when_work_raises(platform: Platform, device: torch.device) -> None:
    outer, inner = platform.new_stream(device), platform.new_stream(device)
    before, here = platform.current_stream(device), platform.current_device()

    def fail() -> None:
        platform.launch(inner, lambda: 1 / (platform.current_stream(device) != inner))
        platform.synchronize_stream(inner)

    with platform.use_stream(outer):
        with pytest.raises(ZeroDivisionError):
            fail()
        assert platform.current_stream(device) == outer
    assert platform.current_stream(device) == before
    assert platform.current_device() == here


def test_the_current_device_is_the_threads_own(platform: Platform, device: torch.device) -> None:
    def enter() -> torch.device:
        platform.set_device(device)
        return platform.current_device()

    assert in_thread(enter) == [device]
    assert platform.current_device() == device


def test_launched_work_sees_its_stream_as_the_current_one(platform: Platform, device: torch.device) -> None:
    stream, seen = platform.new_stream(device), list[object]()
    platform.launch(stream, lambda: seen.append(platform.current_stream(device) == stream))
    platform.synchronize_stream(stream)
    assert seen == [True]


def test_new_streams_are_not_the_current_one(platform: Platform, device: torch.device) -> None:
    assert all(platform.new_stream(device) != platform.current_stream(device) for _ in range(3))


def test_a_generic_stream_becomes_a_native_one(platform: Platform, device: torch.device) -> None:
    generic = torch.cpu.Stream() if device.type == "cpu" else torch.Stream(device=device)
    native = platform.as_native(generic, device)
    there, back = pinned(platform, numbered(255)), platform.alloc_pinned(255)
    tensor, event = on_device(platform, torch.zeros(255, dtype=torch.uint8), device), platform.new_event()
    platform.copy_async(tensor, there, native)
    platform.copy_async(back, tensor, native)
    platform.record(event, native)
    platform.d2h_fence(native, event)
    assert torch.equal(back, numbered(255))


def test_a_native_stream_stays_as_it_is(platform: Platform, device: torch.device) -> None:
    stream = platform.new_stream(device)
    assert platform.as_native(stream, device) is stream
    with pytest.raises(ValueError, match="as a"):
        platform.as_native(object(), device)


def test_time_passes_between_two_events_where_it_can_be_told(
    platform: Platform, device: torch.device
) -> None:
    stream = platform.new_stream(device)
    timing = platform.features.event_timing
    start, end = platform.new_event(timing=timing), platform.new_event(timing=timing)
    platform.record(start, stream)
    keep_busy(platform, stream, device)
    platform.record(end, stream)
    platform.synchronize_event(end)
    elapsed = platform.elapsed_ms(start, end) if timing else None
    assert elapsed is None or elapsed > 0


def test_memory_info_is_free_within_total(platform: Platform, device: torch.device) -> None:
    info = platform.mem_info(device)
    assert info is None or 0 < info[0] <= info[1]


def test_a_handle_names_a_stream_where_there_is_a_driver(platform: Platform, device: torch.device) -> None:
    handles = {platform.stream_handle(platform.new_stream(device)) for _ in range(2)}
    assert handles == {0} if device.type == "cpu" else 0 not in handles and len(handles) == 2


def test_closing_ends_the_platforms_threads_and_new_streams_still_work(
    platform: Platform, device: torch.device
) -> None:
    tensor = on_device(platform, torch.zeros(9, dtype=torch.uint8), device)
    fill(platform, platform.new_stream(device), tensor, 1)
    platform.close()
    fill(platform, platform.new_stream(device), tensor, 2)
    assert read(platform, tensor).eq(2).all()
