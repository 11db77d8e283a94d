"""The CPU platform: threads behind streams, lateness, errors, memory."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lwkv.platforms import CopyBatch
from lwkv.platforms.cpu import CPU

HOST = torch.device("cpu")
Threads: TypeAlias = Callable[[], list[threading.Thread]]


@pytest.fixture
def cpu() -> Iterator[CPU]:
    platform = CPU()
    yield platform
    platform.close()


@pytest.fixture
def threads_of_streams() -> Threads:
    """What threads of streams there are; those of tests before, which may not have ended, are left out."""
    before = set(threading.enumerate())
    return lambda: [
        thread
        for thread in threading.enumerate()
        if thread not in before and thread.name.startswith("lwkv-cpu-stream")
    ]


def load_then_read(cpu: CPU, wait: bool) -> list[int]:
    """Load on a late stream and read on the current one, with or without the wait between them."""
    load, event = cpu.new_stream(HOST, late=True), cpu.new_event()
    page, tensor = cpu.alloc_pinned(5), torch.zeros(5, dtype=torch.uint8)
    page.copy_(torch.arange(11, 16))
    cpu.copy_async(tensor, page, load)
    cpu.record(event, load)
    if wait:
        cpu.wait_event(cpu.current_stream(HOST), event)
    return tensor.tolist()


def test_a_forgotten_wait_gives_wrong_bytes_every_time(cpu: CPU) -> None:
    assert [load_then_read(cpu, wait=False) for _ in range(20)] == [[0] * 5] * 20


def test_with_the_wait_the_bytes_are_right(cpu: CPU) -> None:
    assert [load_then_read(cpu, wait=True) for _ in range(20)] == [[11, 12, 13, 14, 15]] * 20


def test_a_page_used_again_too_early_is_seen_by_the_device(cpu: CPU) -> None:
    load = cpu.new_stream(HOST, late=True)
    page, tensor = cpu.alloc_pinned(3), torch.zeros(3, dtype=torch.uint8)
    page.fill_(1)
    cpu.copy_async(tensor, page, load)
    page.fill_(2)
    cpu.synchronize_stream(load)
    assert tensor.tolist() == [2, 2, 2]


def test_a_save_that_nobody_waits_for_leaves_the_page_as_it_was(cpu: CPU) -> None:
    save, event = cpu.new_stream(HOST, late=True), cpu.new_event()
    page, buffer = cpu.alloc_pinned(4), torch.full((4,), 7, dtype=torch.uint8)
    page.zero_()
    zeros = np.zeros(1, np.int64)
    batch = CopyBatch([page], zeros, zeros, zeros + page.data_ptr(), zeros, zeros + 4)
    cpu.save_batch(buffer, batch, save)
    cpu.record(event, save)
    assert page.tolist() == [0] * 4
    assert not cpu.query(event)
    cpu.d2h_fence(save, event)
    assert page.tolist() == [7] * 4


def test_demand_passes_through_the_waits_of_other_streams(cpu: CPU) -> None:
    streams = [cpu.new_stream(HOST, late=True) for _ in range(4)]
    events, order = [cpu.new_event() for _ in streams], list[int]()
    for number, (stream, event) in enumerate(zip(streams, events, strict=True)):
        if number:
            cpu.wait_event(stream, events[number - 1])
        cpu.launch(stream, lambda number=number: order.append(number))
        cpu.record(event, stream)
    assert order == []
    cpu.synchronize_event(events[-1])
    assert order == [0, 1, 2, 3]


def test_a_stream_that_is_not_late_demands_what_it_waits_for(cpu: CPU) -> None:
    late, eager = cpu.new_stream(HOST, late=True), cpu.new_stream(HOST)
    order, reached = list[str](), cpu.new_event()
    cpu.launch(late, lambda: order.append("late"))
    cpu.wait_stream(eager, late)
    cpu.launch(eager, lambda: order.append("eager"))
    cpu.record(reached, eager)
    cpu.synchronize_event(reached)
    assert order == ["late", "eager"]


def test_demand_runs_only_what_is_before_it(cpu: CPU) -> None:
    late, event, order = cpu.new_stream(HOST, late=True), cpu.new_event(), list[int]()
    cpu.launch(late, lambda: order.append(1))
    cpu.record(event, late)
    cpu.launch(late, lambda: order.append(2))
    cpu.synchronize_event(event)
    assert order == [1]
    cpu.synchronize_device(HOST)
    assert order == [1, 2]


def test_lateness_can_be_taken_back(cpu: CPU) -> None:
    stream, ran = cpu.new_stream(HOST, late=True), threading.Event()
    cpu.launch(stream, ran.set)
    assert stream.late
    stream.late = False
    assert ran.wait(30)


def test_an_event_recorded_again_stands_for_the_new_place(cpu: CPU) -> None:
    stream, event, order = cpu.new_stream(HOST, late=True), cpu.new_event(), list[int]()
    cpu.record(event, stream)
    assert cpu.query(event)
    cpu.launch(stream, lambda: order.append(1))
    cpu.record(event, stream)
    assert not cpu.query(event)
    cpu.synchronize_event(event)
    assert order == [1]


def test_an_event_that_was_never_recorded_is_refused(cpu: CPU) -> None:
    event, stream = cpu.new_event(), cpu.new_stream(HOST)
    uses: list[Callable[[], object]] = [
        lambda: cpu.query(event),
        lambda: cpu.synchronize_event(event),
        lambda: cpu.wait_event(stream, event),
        lambda: cpu.wait_event(cpu.current_stream(HOST), event),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="never recorded"):
            use()


def test_the_inline_stream_works_at_once(cpu: CPU, threads_of_streams: Threads) -> None:
    current, event, seen = cpu.current_stream(HOST), cpu.new_event(), list[int]()
    cpu.launch(current, lambda: seen.append(threading.get_ident()))
    cpu.record(event, current)
    assert seen == [threading.get_ident()]
    assert cpu.query(event)
    assert threads_of_streams() == []


def divide_by_zero() -> float:
    return 1 / 0


def test_an_error_reaches_everyone_who_waits_behind_it(cpu: CPU) -> None:
    stream, other = cpu.new_stream(HOST), cpu.new_stream(HOST)
    before, after, far = cpu.new_event(), cpu.new_event(), cpu.new_event()
    ran = list[int]()
    cpu.record(before, stream)
    cpu.launch(stream, divide_by_zero)
    cpu.launch(stream, lambda: ran.append(1))
    cpu.record(after, stream)
    cpu.wait_event(other, after)
    cpu.launch(other, lambda: ran.append(2))
    cpu.record(far, other)
    cpu.synchronize_event(before)
    waits: list[Callable[[], object]] = [
        lambda: cpu.synchronize_event(after),
        lambda: cpu.synchronize_event(far),
        lambda: cpu.synchronize_stream(stream),
        lambda: cpu.synchronize_stream(other),
        lambda: cpu.synchronize_device(HOST),
        lambda: cpu.wait_event(cpu.current_stream(HOST), far),
    ]
    for wait in waits:
        with pytest.raises(ZeroDivisionError):
            wait()
    assert ran == []


def test_an_error_of_a_stream_reached_long_ago_still_spreads(cpu: CPU) -> None:
    stream, other = cpu.new_stream(HOST), cpu.new_stream(HOST)
    cpu.launch(stream, divide_by_zero)
    with pytest.raises(ZeroDivisionError):
        cpu.synchronize_stream(stream)
    cpu.wait_stream(other, stream)
    with pytest.raises(ZeroDivisionError):
        cpu.synchronize_stream(other)


def test_an_error_leaves_other_streams_and_threads_alone(cpu: CPU) -> None:
    broken, sound, ran = cpu.new_stream(HOST), cpu.new_stream(HOST), list[int]()
    cpu.launch(broken, divide_by_zero)
    cpu.launch(sound, lambda: ran.append(1))
    cpu.synchronize_stream(sound)
    assert ran == [1]


def test_a_failed_stream_can_be_dropped_with_its_tensors(cpu: CPU) -> None:
    stream, tensor = cpu.new_stream(HOST), torch.zeros(3)
    kept = weakref.ref(tensor)

    def fail(tensor: torch.Tensor = tensor) -> None:
        raise ValueError(tensor.shape)

    cpu.launch(stream, fail)
    with pytest.raises(ValueError, match="3"):
        cpu.synchronize_stream(stream)
    del stream, tensor, fail
    cpu.close()
    gc.collect()
    assert kept() is None


def test_a_delay_comes_before_every_operation() -> None:
    asked = list[int]()
    cpu = CPU(delay=lambda: asked.append(1) or 0.001)
    stream = cpu.new_stream(HOST)
    for _ in range(3):
        cpu.launch(stream, lambda: None)
    cpu.synchronize_stream(stream)
    cpu.close()
    assert asked == [1, 1, 1]


def test_a_delay_that_raises_is_an_error_of_the_stream() -> None:
    cpu = CPU(delay=divide_by_zero)
    stream = cpu.new_stream(HOST)
    cpu.launch(stream, lambda: None)
    with pytest.raises(ZeroDivisionError):
        cpu.synchronize_stream(stream)
    cpu.close()


def test_a_thread_starts_with_the_first_operation_and_ends_with_close(
    cpu: CPU, threads_of_streams: Threads
) -> None:
    stream, ran = cpu.new_stream(HOST, late=True), list[int]()
    assert threads_of_streams() == []
    cpu.launch(stream, lambda: ran.append(1))
    assert len(threads_of_streams()) == 1
    cpu.close()
    assert ran == [1]
    assert threads_of_streams() == []
    with pytest.raises(RuntimeError, match="closed"):
        cpu.launch(stream, lambda: None)
    cpu.synchronize_stream(stream)


def test_a_dropped_stream_finishes_its_work_and_ends_its_thread(
    cpu: CPU, threads_of_streams: Threads
) -> None:
    stream, ran, event = cpu.new_stream(HOST, late=True), list[int](), cpu.new_event()
    cpu.launch(stream, lambda: ran.append(1))
    cpu.record(event, stream)
    (thread,) = threads_of_streams()
    del stream
    cpu.synchronize_event(event)
    thread.join(30)
    assert ran == [1]
    assert not thread.is_alive()


def test_work_can_use_its_own_stream(cpu: CPU) -> None:
    stream, event, order = cpu.new_stream(HOST), cpu.new_event(), list[str]()

    def outer() -> None:
        order.append("before")
        cpu.launch(stream, lambda: order.append("inside"))
        cpu.record(event, stream)
        cpu.synchronize_event(event)
        cpu.synchronize_stream(stream)
        order.append("after")

    cpu.launch(stream, outer)
    cpu.launch(stream, lambda: order.append("next"))
    cpu.synchronize_stream(stream)
    assert order == ["before", "inside", "after", "next"]


def test_work_that_waits_for_later_work_of_its_own_stream_fails_instead_of_hanging(cpu: CPU) -> None:
    stream, event = cpu.new_stream(HOST, late=True), cpu.new_event()
    cpu.launch(stream, lambda: cpu.synchronize_event(event))
    cpu.launch(stream, lambda: None)
    cpu.record(event, stream)
    with pytest.raises(RuntimeError, match="later operation of its own stream"):
        cpu.synchronize_stream(stream)


def test_work_keeps_the_callers_grad_and_inference_modes(cpu: CPU) -> None:
    stream, modes = cpu.new_stream(HOST), list[tuple[bool, bool]]()

    def look() -> None:
        modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    cpu.launch(stream, look)
    with torch.no_grad():
        cpu.launch(stream, look)
    with torch.inference_mode():
        cpu.launch(stream, look)
    cpu.synchronize_stream(stream)
    assert modes == [(False, True), (False, False), (True, False)]


def test_copies_work_on_inference_tensors_and_parameters(cpu: CPU) -> None:
    stream, page = cpu.new_stream(HOST), cpu.alloc_pinned(12)
    source = page.view(torch.float32)
    source.copy_(torch.tensor([1.5, -2.5, 3.5]))
    with torch.inference_mode():
        inferred = torch.zeros(3)
    parameter = torch.zeros(3, requires_grad=True)
    for tensor in (inferred, parameter):
        cpu.copy_async(tensor, source, stream)
        cpu.synchronize_stream(stream)
        assert tensor.tolist() == [1.5, -2.5, 3.5]


def test_many_threads_can_share_a_stream(cpu: CPU) -> None:
    stream, total = cpu.new_stream(HOST), list[int]()

    def add() -> None:
        for _ in range(200):
            cpu.launch(stream, lambda: total.append(len(total)))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cpu.synchronize_stream(stream)
    assert total == list(range(800))


def test_a_batch_that_leaves_its_slab_or_buffer_is_refused(cpu: CPU) -> None:
    slab, buffer, stream = cpu.alloc_pinned(16), torch.zeros(16, dtype=torch.uint8), cpu.new_stream(HOST)
    for host, device, size in ((12, 0, 5), (0, 12, 5), (-1, 0, 2), (0, -1, 2), (0, 0, 0)):
        values = [np.array([value], np.int64) for value in (0, host, slab.data_ptr() + host, device, size)]
        with pytest.raises(ValueError, match=f"run 0 is {size} bytes at {host} of a slab of 16"):
            cpu.load_batch(buffer, CopyBatch([slab], *values), stream)


def test_a_batch_whose_addresses_are_not_those_of_its_slabs_is_refused(cpu: CPU) -> None:
    slab, buffer, zero = cpu.alloc_pinned(16), torch.zeros(16, dtype=torch.uint8), np.zeros(1, np.int64)
    batch = CopyBatch([slab], zero, zero, zero + slab.data_ptr() + 1, zero, zero + 4)
    with pytest.raises(ValueError, match="slab at"):
        cpu.save_batch(buffer, batch, cpu.new_stream(HOST))


def test_memory_may_be_freed_by_the_garbage_collector_while_it_is_looked_up(cpu: CPU) -> None:
    class Cycle:
        """Keeps memory until the collector finds it."""

        def __init__(self) -> None:
            self.me, self.memory = self, cpu.alloc_pinned(8)

    kept = [cpu.alloc_pinned(8) for _ in range(40)]
    thresholds = gc.get_threshold()
    try:
        for allocations in range(1, 40):
            gc.disable()
            Cycle()
            gc.set_threshold(allocations, 1, 1)
            gc.enable()
            assert cpu.is_pinned(kept[0])
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()


def test_freed_pinned_memory_is_no_longer_known(cpu: CPU) -> None:
    memory = cpu.alloc_pinned(4096)
    view = memory[7:9]
    del memory
    gc.collect()
    assert cpu.is_pinned(view)
    del view
    gc.collect()
    assert cpu._pinned == {}


def test_other_devices_are_refused(cpu: CPU) -> None:
    cuda = torch.device("cuda", 0)
    uses: list[Callable[[torch.device], object]] = [
        cpu.set_device, cpu.current_stream, cpu.new_stream, cpu.synchronize_device, cpu.mem_info,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(ValueError, match="got device cuda:0 on the CPU platform"):
            use(cuda)


def test_events_without_time_or_not_reached_have_none(cpu: CPU) -> None:
    stream, plain, timed = cpu.new_stream(HOST, late=True), cpu.new_event(), cpu.new_event(timing=True)
    cpu.record(plain, stream)
    cpu.record(timed, stream)
    with pytest.raises(RuntimeError, match="timing=True"):
        cpu.elapsed_ms(plain, plain)
    with pytest.raises(RuntimeError, match="not reached"):
        cpu.elapsed_ms(timed, timed)


def test_a_stream_does_not_survive_a_fork() -> None:
    program = """
import os, torch
from lwkv.platforms.cpu import CPU
cpu = CPU(); device = cpu.current_device(); stream = cpu.new_stream(device)
cpu.launch(stream, lambda: None)
child = os.fork()
if child == 0:
    try:
        cpu.launch(stream, lambda: None)
    except RuntimeError as error:
        fresh, ran = cpu.new_stream(device), []
        cpu.launch(fresh, lambda: ran.append(1)); cpu.synchronize_stream(fresh); cpu.close()
        os._exit(0 if "fork" in str(error) and ran == [1] else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_python(program) == "0\n"


@pytest.mark.parametrize("late", [False, True])
def test_a_process_ends_well_with_work_in_its_streams(late: bool) -> None:
    program = f"""
import torch
from lwkv.platforms.cpu import CPU
cpu = CPU(delay=lambda: 0.001); device = cpu.current_device(); stream = cpu.new_stream(device, late={late})
page, tensor = cpu.alloc_pinned(1 << 20), torch.zeros(1 << 20, dtype=torch.uint8)
for _ in range(50):
    cpu.copy_async(tensor, page, stream)
    cpu.launch(stream, lambda: tensor.add_(1))
print("end")
"""
    assert run_python(program) == "end\n"


def run_python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


ACTIONS = st.tuples(
    st.sampled_from(["work", "record", "wait", "join", "late"]), st.integers(0, 2), st.integers(0, 3)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTIONS, max_size=40), st.lists(st.booleans(), min_size=3, max_size=3), st.integers(0, 99))
def test_every_program_of_streams_and_events_keeps_its_promises(
    actions: list[tuple[str, int, int]], late: list[bool], seed: int
) -> None:
    """What an event of a program promises is done before whatever waited for it."""
    chance = random.Random(seed)
    cpu = CPU(delay=lambda: chance.choice((0.0, 0.0, 0.0001)))
    streams = [cpu.new_stream(HOST, late=each) for each in late]
    events = {number: cpu.new_event() for number in range(4)}
    promised: dict[int, set[int]] = {}  # what each recorded event stands for
    needed: list[set[int]] = [set(), set(), set()]  # what each stream's next work must come after
    finished, broken = set[int](), list[int]()

    def work(number: int, before: set[int]) -> None:
        if not before <= finished:
            broken.append(number)
        finished.add(number)

    for number, (action, at, event) in enumerate(actions):
        if action == "work":
            cpu.launch(streams[at], lambda number=number, before=set(needed[at]): work(number, before))
            needed[at].add(number)
        elif action == "record":
            cpu.record(events[event], streams[at])
            promised[event] = set(needed[at])
        elif action == "wait" and event in promised:
            cpu.wait_event(streams[at], events[event])
            needed[at] |= promised[event]
        elif action == "join" and event in promised:
            cpu.synchronize_event(events[event])
            assert promised[event] <= finished
        elif action == "late":
            streams[at].late = bool(event % 2)
    cpu.synchronize_device(HOST)
    cpu.close()
    assert broken == []
    assert finished == {number for number, (action, _, _) in enumerate(actions) if action == "work"}
