"""Daemon threads that run jobs in the background; nothing of theirs outlives the process."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from lwkv.background.exit import end_at_exit, waitable
from lwkv.errors import ErrorsTo

T = TypeVar("T")


Job = tuple[Callable[[], Any], Future[Any]]


class Workers:
    """A few threads and one queue of jobs. Unlike an executor of the standard library they are daemons:
    a job that hangs in a dead peer cannot keep the process from ending.

    Threads start with the first jobs. They end with `close` or `leave`, or when nobody has the workers any
    more and the jobs are done. A child process has none of them: nothing runs there, and nothing is waited
    for. Thread-safe.

    Args:
        on_start: each thread calls it before its first job, whose future has the error if it raises.
    """

    def __init__(self, name: str, count: int, on_start: Callable[[], object] | None = None) -> None:
        self._name = name
        self._count = count
        self._on_start = on_start
        self._queue = _Queue()
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        # The threads know the queue alone. A finalizer may come on any thread, whatever locks it holds.
        weakref.finalize(self, self._queue.take_no_more).atexit = False
        # Before there is a thread: at the exit no first one is started any more.
        end_at_exit(self)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; what it returns or raises is the future's.

        The future is cancelled after `close`, and where the system has no thread to run the job.
        """
        future: Future[T] = Future()
        if self._is_forked() or not self._queue.add((job, future), self._has_thread):
            return cancel(future)
        return future

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until no job is queued or running; False if that took longer than `timeout_s` seconds.

        A job runs until the callbacks of its future have returned.
        """
        if self._is_forked():
            return self._queue.is_idle()  # the lock may be held for ever
        return self._queue.wait_idle(waitable(timeout_s))

    def close(self, timeout_s: float) -> bool:
        """Take no more jobs, let those queued end and the threads with them; False if that took too long."""
        if not self._is_forked():
            self._queue.take_no_more()
        return self.wait_idle(timeout_s)

    def cancel_queued(self) -> int:
        """Cancel every job that has not begun; return how many."""
        if self._is_forked():
            return 0
        queued = self._queue.take_all()
        for _, future in queued:
            cancel(future)
        return len(queued)

    def leave(self) -> None:
        """Let the threads end after the jobs they run now."""
        self._queue.take_no_more()
        self.cancel_queued()

    def join(self, seconds: float) -> None:
        """Block until the threads have ended, `seconds` at most."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(waitable(deadline - time.monotonic()))

    def _is_forked(self) -> bool:
        return self._process != os.getpid()

    def _has_thread(self) -> bool:
        """Start one more thread if some are missing; whether there is any."""
        if len(self._threads) < self._count:
            name = f"lwkv-{self._name}-{len(self._threads)}"
            thread = threading.Thread(
                target=_work, args=(self._queue, self._on_start), name=name, daemon=True
            )
            with suppress(RuntimeError, MemoryError):  # as many as the system lets the process have
                thread.start()
                self._threads.append(thread)
        return bool(self._threads)


class _Queue:
    """Jobs, and calls that wake a thread: at least one for each job, and one more once no more are taken."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._running = 0
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._calls: SimpleQueue[None] = SimpleQueue()
        self._closed = False

    def add(self, job: Job, has_thread: Callable[[], bool]) -> bool:
        """Queue a job; False where no more are taken, and where there is no thread."""
        with self._lock:
            if self._closed or not has_thread():
                return False
            self._jobs.append(job)
        self._calls.put(None)
        return True

    def take_no_more(self) -> None:
        """Have the threads end after the jobs that are queued. Takes no lock."""
        self._closed = True
        self._calls.put(None)

    def take_all(self) -> list[Job]:
        """Take the jobs that have not begun."""
        with self._lock:
            jobs = list(self._jobs)
            self._jobs.clear()
            self._idle.notify_all()
        return jobs

    def is_idle(self) -> bool:
        return not self._jobs and not self._running

    def wait_idle(self, seconds: float) -> bool:
        with self._idle:
            return self._idle.wait_for(self.is_idle, seconds)

    def next(self) -> Job | None:
        """Wait for a job, which `done` has to follow; None where there will be none any more."""
        while True:
            self._calls.get()
            with self._lock:
                if self._jobs:
                    self._running += 1
                    return self._jobs.popleft()
                has_ended = self._closed
            if has_ended:
                self._calls.put(None)  # for the next thread
                return None

    def done(self) -> None:
        with self._lock:
            self._running -= 1
            self._idle.notify_all()


def _work(queue: _Queue, on_start: Callable[[], object] | None) -> None:
    # Each job in a call of its own: what it refers to does not live on while the thread waits.
    while _run_next(queue, on_start):
        on_start = None


def _run_next(queue: _Queue, on_start: Callable[[], object] | None) -> bool:
    found = queue.next()
    if found is None:
        return False
    job, future = found
    if future.set_running_or_notify_cancel():
        with ErrorsTo(future.set_exception):
            if on_start is not None:
                on_start()
            future.set_result(job())
    queue.done()
    return True


def cancel(future: Future[T]) -> Future[T]:
    """Cancel a future whose job never begins, so that those who wait for it go on."""
    if future.cancel():
        future.set_running_or_notify_cancel()
    return future
