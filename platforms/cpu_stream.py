"""Streams and events of the CPU platform."""

from __future__ import annotations

import time
import weakref

import torch

from lwkv.platforms.cpu_worker import Delay, Operation, Outcome, StreamThread, Worker


class Mark:
    """A place in a worker's queue."""

    __slots__ = ("_outcome", "_place", "_worker")

    def __init__(self, worker: Worker, place: int, outcome: Outcome) -> None:
        self._worker, self._place, self._outcome = worker, place, outcome

    def is_reached(self) -> bool:
        return self._worker.is_done(self._place)

    def has_failed(self) -> bool:
        return self._outcome.has_failed(self._place)

    def reach(self) -> None:
        """Demand the place and block until it is reached. Raises what an operation before it raised."""
        self._worker.reach(self._place)
        self._outcome.check(self._place)


class NowMark:
    """A place that is reached already: where an inline stream always is."""

    def is_reached(self) -> bool:
        return True

    def has_failed(self) -> bool:
        return False

    def reach(self) -> None: ...


class InlineStream:
    """The stream a thread has by default: an operation runs at once, on the thread that queues it."""

    late = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def put(self, operation: Operation) -> NowMark:
        operation()
        return NowMark()

    def mark(self) -> NowMark:
        return NowMark()

    def wait(self, mark: Mark | NowMark) -> None:
        if not StreamThread.is_current():
            mark.reach()


class WorkerStream:
    """A stream with a thread of its own, which ends when the stream is dropped and its work is done.

    `late`, which may be set at any time, holds every operation back until somebody waits for it.
    """

    def __init__(self, device: torch.device, name: str, delay: Delay | None) -> None:
        self.device = device
        self._outcome = Outcome()
        self.worker = Worker(name, delay, self._outcome)
        weakref.finalize(self, self.worker.end).atexit = False

    @property
    def late(self) -> bool:
        return self.worker.late

    @late.setter
    def late(self, late: bool) -> None:
        self.worker.late = late

    def put(self, operation: Operation) -> Mark:
        return Mark(self.worker, self.worker.put(operation), self._outcome)

    def mark(self) -> Mark:
        return Mark(self.worker, self.worker.place(), self._outcome)

    def wait(self, mark: Mark | NowMark) -> None:
        if not mark.is_reached() or mark.has_failed():
            self.worker.put_behind(mark.reach)


class CpuEvent:
    """The latest recorded place of a stream and, with `timing`, the time at which it was reached."""

    def __init__(self, timing: bool) -> None:
        self._timing = timing
        self._recorded: tuple[Mark | NowMark, list[float]] | None = None

    def record(self, stream: InlineStream | WorkerStream) -> None:
        times: list[float] = []
        mark = stream.put(lambda: times.append(time.perf_counter())) if self._timing else stream.mark()
        self._recorded = (mark, times)

    def mark(self) -> Mark | NowMark:
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

    def _latest(self) -> tuple[Mark | NowMark, list[float]]:
        if self._recorded is None:
            raise RuntimeError("this event was never recorded; call record(event, stream) first")
        return self._recorded
