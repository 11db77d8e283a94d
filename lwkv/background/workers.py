"""Daemon threads that run jobs in the background; nothing of theirs outlives the process."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from lwkv.background.exit import end_at_exit, waitable
from lwkv.errors import ErrorsTo

T = TypeVar("T")


class Workers:
    """A few threads and one queue of jobs. Unlike an executor of the standard library they are daemons:
    a job that hangs in a dead peer cannot keep the process from ending.

    Threads start with the first jobs. A child process has none of them: nothing runs there, and nothing is
    waited for. Thread-safe.

    Args:
        on_start: each thread calls it before its first job, whose future has the error if it raises.
    """

    def __init__(self, name: str, count: int, on_start: Callable[[], object] | None = None) -> None:
        self._name = name
        self._count = count
        self._on_start = on_start
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._closed = False
        self._process = os.getpid()
        # Before there is a thread: at the exit no first one is started any more.
        end_at_exit(self)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; what it returns or raises is the future's.

        The future is cancelled after `close`, and where the system has no thread to run the job.
        """
        future: Future[T] = Future()
        if self._is_forked():
            return cancel(future)
        with self._lock:
            if not self._closed and self._has_thread():
                self._jobs.append((job, future))
                self._ready.notify()
                return future
        return cancel(future)

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until no job is queued or running; False if that took longer than `timeout_s` seconds.

        A job runs until the callbacks of its future have returned.
        """
        if self._is_forked():
            return self._is_idle()  # the lock may be held for ever
        with self._idle:
            return self._idle.wait_for(self._is_idle, waitable(timeout_s))

    def close(self, timeout_s: float) -> bool:
        """Take no more jobs, let those queued end and the threads with them; False if that took too long."""
        if not self._is_forked():
            self._take_no_more()
        return self.wait_idle(timeout_s)

    def cancel_queued(self) -> int:
        """Cancel every job that has not begun; return how many."""
        if self._is_forked():
            return 0
        with self._lock:
            queued = [future for _, future in self._jobs]
            self._jobs.clear()
            self._idle.notify_all()
        for future in queued:
            cancel(future)
        return len(queued)

    def leave(self) -> None:
        """Let the threads end after the jobs they run now."""
        self._take_no_more()
        self.cancel_queued()

    def join(self, seconds: float) -> None:
        """Block until the threads have ended, `seconds` at most."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(waitable(deadline - time.monotonic()))

    def _is_idle(self) -> bool:
        return not self._jobs and not self._running

    def _is_forked(self) -> bool:
        return self._process != os.getpid()

    def _take_no_more(self) -> None:
        with self._lock:
            self._closed = True
            self._ready.notify_all()

    def _has_thread(self) -> bool:
        """Start one more thread if some are missing; whether there is any."""
        if len(self._threads) < self._count:
            name = f"lwkv-{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            with suppress(RuntimeError, MemoryError):  # as many as the system lets the process have
                thread.start()
                self._threads.append(thread)
        return bool(self._threads)

    def _work(self) -> None:
        # Each job in a call of its own: what it refers to does not live on while the thread waits.
        on_start = self._on_start
        while self._run_next(on_start):
            on_start = None

    def _run_next(self, on_start: Callable[[], object] | None) -> bool:
        with self._lock:
            self._ready.wait_for(lambda: self._jobs or self._closed)
            if not self._jobs:
                return False
            job, future = self._jobs.popleft()
            self._running += 1
        if future.set_running_or_notify_cancel():
            with ErrorsTo(future.set_exception):
                if on_start is not None:
                    on_start()
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
