"""The CPU platform: streams are threads, events are places in their queues, copies are truly asynchronous.

It serves users without an accelerator. It also shows races: a late stream does its work as late as the
recorded events allow, so that a forgotten wait gives wrong bytes every time. What it cannot do is to move
plain torch calls to a stream: work for a stream goes through `launch`. Streams do not survive a fork.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch

from lwkv.platforms.checks import check_buffer, check_copy, check_runs
from lwkv.platforms.cpu_stream import CpuEvent, InlineStream, WorkerStream
from lwkv.platforms.cpu_worker import Delay, Worker
from lwkv.platforms.host_limits import read_limits
from lwkv.platforms.host_memory import allocate_aligned, call_at_end, check_size, no_memory
from lwkv.platforms.protocol import CopyBatch, Features, Int64s

CpuStream: TypeAlias = InlineStream | WorkerStream


class CPU:
    """The host as a device. `delay` gives the seconds each stream's thread sleeps before an operation."""

    name = device_type = "cpu"
    features = Features(host_register=True, batch_copy=True, event_timing=True)
    how_to_get = "the CPU is always there"

    def __init__(self, delay: Delay | None = None) -> None:
        self._delay = delay
        self._device = torch.device("cpu")
        self._inline = InlineStream(self._device)
        self._thread = threading.local()
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self._workers_lock = threading.Lock()
        self._numbers = itertools.count()
        self._pinned: dict[int, int] = {}  # start -> end of page-locked ranges

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> torch.device:
        return self._device

    def set_device(self, device: torch.device) -> None:
        self._check_device(device)

    def current_stream(self, device: torch.device) -> CpuStream:
        self._check_device(device)
        stream: CpuStream = getattr(self._thread, "stream", self._inline)
        return stream

    def new_stream(
        self, device: torch.device, high_priority: bool = False, late: bool = False
    ) -> WorkerStream:
        """Make a stream; `late` holds its work back until somebody waits for it."""
        self._check_device(device)
        stream = WorkerStream(self._device, f"lwkv-cpu-stream-{next(self._numbers)}", self._delay)
        stream.late = late
        with self._workers_lock:
            self._workers.add(stream.worker)
        return stream

    @contextmanager
    def use_stream(self, stream: CpuStream) -> Iterator[None]:
        outer = getattr(self._thread, "stream", self._inline)
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = outer

    def as_native(self, stream: object, device: torch.device) -> CpuStream:
        self._check_device(device)
        if isinstance(stream, InlineStream | WorkerStream):
            return stream
        if isinstance(stream, torch.cpu.Stream):
            return self._inline
        raise ValueError(f"got {stream!r} as a CPU stream; give one of new_stream or current_stream")

    def launch(self, stream: CpuStream, work: Callable[[], object]) -> None:
        inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def run() -> None:
            with self.use_stream(stream), torch.inference_mode(inference), torch.set_grad_enabled(grad):
                work()

        stream.put(run)

    def launch_handle(self, stream: CpuStream) -> int | None:
        return None

    def new_event(self, timing: bool = False, blocking: bool = False) -> CpuEvent:
        return CpuEvent(timing)

    def record(self, event: CpuEvent, stream: CpuStream) -> None:
        event.record(stream)

    def wait_event(self, stream: CpuStream, event: CpuEvent) -> None:
        stream.wait(event.mark())

    def wait_stream(self, waiter: CpuStream, other: CpuStream) -> None:
        waiter.wait(other.mark())

    def query(self, event: CpuEvent) -> bool:
        return event.mark().is_reached()

    def synchronize_event(self, event: CpuEvent) -> None:
        event.mark().reach()

    def synchronize_stream(self, stream: CpuStream) -> None:
        stream.mark().reach()

    def synchronize_device(self, device: torch.device) -> None:
        self._check_device(device)
        with self._workers_lock:
            workers = list(self._workers)
        for worker in workers:
            worker.finish()

    def elapsed_ms(self, start: CpuEvent, end: CpuEvent) -> float | None:
        return (end.time() - start.time()) * 1000

    def stream_handle(self, stream: CpuStream) -> int:
        return 0

    @torch.inference_mode(False)
    def alloc_pinned(self, nbytes: int) -> torch.Tensor:
        check_size(nbytes)
        try:
            memory, array = allocate_aligned(nbytes)
        except MemoryError as error:
            raise no_memory(nbytes) from error
        start, pinned = memory.data_ptr(), self._pinned
        pinned[start] = start + nbytes
        call_at_end(array, lambda _: pinned.pop(start, None))
        return memory

    def is_pinned(self, memory: torch.Tensor) -> bool:
        start = memory.data_ptr()
        end = start + memory.nbytes
        return any(first <= start and end <= last for first, last in self._pinned.copy().items())

    def host_register(self, memory: torch.Tensor) -> bool:
        self._pinned[memory.data_ptr()] = memory.data_ptr() + memory.nbytes
        return True

    def host_unregister(self, memory: torch.Tensor) -> None:
        self._pinned.pop(memory.data_ptr(), None)

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, stream: CpuStream) -> None:
        check_copy(dst, src)
        mark = stream.put(lambda: ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.nbytes))
        if not (self.is_pinned(dst) or self.is_pinned(src)):
            mark.reach()

    def load_batch(self, buffer: torch.Tensor, batch: CopyBatch, stream: CpuStream) -> None:
        self._check_batch(buffer, batch)
        stream.put(lambda: _move(_device_addresses(buffer, batch), batch.host_addresses, batch))

    def save_batch(self, buffer: torch.Tensor, batch: CopyBatch, stream: CpuStream) -> None:
        self._check_batch(buffer, batch)
        stream.put(lambda: _move(batch.host_addresses, _device_addresses(buffer, batch), batch))

    def d2h_fence(self, stream: CpuStream, event: CpuEvent, waiter: CpuStream | None = None) -> None:
        if waiter is None:
            self.synchronize_event(event)
        else:
            self.wait_event(waiter, event)

    def mem_info(self, device: torch.device) -> tuple[int, int] | None:
        self._check_device(device)
        limits = read_limits()
        return (min(limit.free for limit in limits), limits[0].total) if limits else None

    def close(self) -> None:
        """Finish what is queued and end the threads; streams made so far take no more work."""
        with self._workers_lock:
            workers = list(self._workers)
            self._workers.clear()
        for worker in workers:
            worker.end()
        for worker in workers:
            worker.join()

    def _check_device(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ValueError(f"got device {device} on the CPU platform; use platform_for(device)")

    def _check_batch(self, buffer: torch.Tensor, batch: CopyBatch) -> None:
        check_buffer(buffer)
        check_runs(buffer, batch)


def _device_addresses(buffer: torch.Tensor, batch: CopyBatch) -> Int64s:
    return batch.device_offsets + buffer.data_ptr()


def _move(to: Int64s, source: Int64s, batch: CopyBatch) -> None:
    for run in np.stack([to, source, batch.sizes], axis=1).tolist():
        ctypes.memmove(*run)
