"""Streams and events of the CPU platform."""

from __future__ import annotations

import time
import weakref

import torch

from lwkv.platforms.cpu_worker import Mark, Operation, Worker


class InlineStream:
    """The stream a thread has by default: an operation runs at once, on the thread that queues it."""

    late = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def put(self, operation: Operation) -> Mark:
        operation()
        return Mark()

    def mark(self) -> Mark:
        return Mark()

    def wait(self, mark: Mark) -> None:
        mark.reach()


class WorkerStream:
    """A stream with a thread of its own, which ends when the stream is dropped and its work is done.

    `late`, which may be set at any time, holds every operation back until somebody waits for it.
    """

    def __init__(self, device: torch.device, worker: Worker) -> None:
        self.device = device
        self._worker = worker
        weakref.finalize(self, worker.end).atexit = False

    @property
    def late(self) -> bool:
        return self._worker.late

    @late.setter
    def late(self, late: bool) -> None:
        self._worker.late = late

    def put(self, operation: Operation) -> Mark:
        return self._worker.put(operation)

    def mark(self) -> Mark:
        return self._worker.mark()

    def wait(self, mark: Mark) -> None:
        if not mark.is_reached() or mark.has_failed():
            self._worker.put(mark.reach)


class CpuEvent:
    """The latest recorded place of a stream and, with `timing`, the time at which it was reached."""

    def __init__(self, timing: bool) -> None:
        self._timing = timing
        self._recorded: tuple[Mark, list[float]] | None = None

    def record(self, stream: InlineStream | WorkerStream) -> None:
        times: list[float] = []
        mark = stream.put(lambda: times.append(time.perf_counter())) if self._timing else stream.mark()
        self._recorded = (mark, times)

    def mark(self) -> Mark:
        return self._latest()[0]

    def time(self) -> float:
        """Seconds at which the latest record was reached."""
        mark, times = self._latest()
        if not self._timing:
            raise RuntimeError("this event has no time; make it with new_event(timing=True)")
        if not mark.is_reached():
            raise RuntimeError("this event is not reached yet; call synchronize_event first")
        mark.reach()
        return times[0]

    def _latest(self) -> tuple[Mark, list[float]]:
        if self._recorded is None:
            raise RuntimeError("this event was never recorded; call record(event, stream) first")
        return self._recorded
