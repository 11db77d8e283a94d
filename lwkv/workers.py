"""Daemon threads that run jobs in the background; nothing of theirs outlives the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Workers:
    """A few threads and one queue of jobs. Unlike an executor of the standard library they are daemons:
    a job that hangs in a dead peer cannot keep the process from ending.

    Threads start with the first job. Thread-safe.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._pending = 0
        self._idle = threading.Condition(self._lock)
        self._closed = False

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; what it returns or raises is the future's. After `close` the future is cancelled."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                future.cancel()
                return future
            self._pending += 1
            self._start()
        self._jobs.put(lambda: self._run(job, future))
        return future

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until no job is queued or running; False if that took longer than `timeout_s` seconds."""
        with self._idle:
            return self._idle.wait_for(lambda: self._pending == 0, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Take no more jobs, let those queued end and the threads with them; False if that took too long."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        return self.wait_idle(timeout_s)

    def _start(self) -> None:
        if len(self._threads) < self._count:
            name = f"lwkv-{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _run(self, job: Callable[[], T], future: Future[T]) -> None:
        with _ErrorsTo(future):
            future.set_result(job())
        with self._idle:
            self._pending -= 1
            self._idle.notify_all()


class _ErrorsTo(Generic[T]):
    """Hands an error to a future instead of the thread it happened in."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            self._future.set_exception(error)
        return True
