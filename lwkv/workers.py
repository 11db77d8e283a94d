"""Daemon threads that run jobs in the background; nothing of theirs outlives the process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class Workers:
    """A few threads and one queue of jobs. Unlike an executor of the standard library they are daemons:
    a job that hangs in a dead peer cannot keep the process from ending.

    Threads start with the first jobs. Thread-safe.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._closed = False

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; what it returns or raises is the future's. After `close` the future is cancelled."""
        future: Future[T] = Future()
        with self._lock:
            if not self._closed:
                self._start()
                self._jobs.append((job, future))
                self._ready.notify()
                return future
        return cancel(future)

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until no job is queued or running; False if that took longer than `timeout_s` seconds.

        A job runs until the callbacks of its future have returned.
        """
        with self._idle:
            return self._idle.wait_for(lambda: not self._jobs and not self._running, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Take no more jobs, let those queued end and the threads with them; False if that took too long."""
        with self._lock:
            self._closed = True
            self._ready.notify_all()
        return self.wait_idle(timeout_s)

    def cancel_queued(self) -> int:
        """Cancel every job that has not begun; return how many."""
        with self._lock:
            queued = [future for _, future in self._jobs]
            self._jobs.clear()
            self._idle.notify_all()
        for future in queued:
            cancel(future)
        return len(queued)

    def _start(self) -> None:
        if len(self._threads) < self._count:
            name = f"lwkv-{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _work(self) -> None:
        # Each job in a call of its own: what it refers to does not live on while the thread waits.
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        with self._lock:
            self._ready.wait_for(lambda: self._jobs or self._closed)
            if not self._jobs:
                return False
            job, future = self._jobs.popleft()
            self._running += 1
        if future.set_running_or_notify_cancel():
            with _ErrorsTo(future):
                future.set_result(job())
        with self._lock:
            self._running -= 1
            self._idle.notify_all()
        return True


def cancel(future: Future[T]) -> Future[T]:
    """Cancel a future whose job never begins, so that those who wait for it go on."""
    if future.cancel():
        future.set_running_or_notify_cancel()
    return future


class _ErrorsTo:
    """Hands an error to a future instead of the thread it happened in."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            self._future.set_exception(error)
        return True
