"""The thread on which batches end, once the device is past them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from lwkv.background.exit import end_at_exit, is_exiting, waitable
from lwkv.errors import ErrorsTo
from lwkv.telemetry.counters import Counters

log = logging.getLogger(__name__)

Job = Callable[[], object]


class CompletionThread:
    """Runs jobs one after the other, on a thread that is there from the start.

    `submit` may come from a finalizer on any thread, whatever locks that thread holds: it takes none. A job
    that raises is counted as "transfer_errors".

    Args:
        on_start: what the thread does before all else.

    Raises:
        RuntimeError: the system has no more threads, or the interpreter is exiting.
    """

    def __init__(self, counters: Counters, on_start: Job | None = None) -> None:
        self._counters = counters
        self._jobs: SimpleQueue[tuple[Job, int]] = SimpleQueue()
        self._expected: set[int] = set()
        self._closing = self._leaving = False
        self._ended = threading.Event()
        self._process = os.getpid()
        if is_exiting():
            raise RuntimeError("the interpreter is exiting: create engines before that")
        if on_start is not None:
            self.submit(on_start)
        self._thread = threading.Thread(target=self._run, name="lwkv-completions", daemon=True)
        self._thread.start()
        end_at_exit(self)

    def expect(self, batch: object) -> None:
        """Stay until a job has been submitted for `batch`, even beyond `close`."""
        self._expected.add(id(batch))

    def submit(self, job: Job, batch: object = None) -> None:
        """Queue a job, the last one for `batch`, which the job keeps alive."""
        self._jobs.put((job, id(batch)))

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until the jobs submitted so far have ended; False if that takes over `timeout_s` seconds."""
        if not self.is_here():
            return self._jobs.empty()
        # A bare lock: whoever waits for an event is woken up and then waits for the lock within.
        passed = threading.Lock()
        passed.acquire()
        self.submit(passed.release)
        # Whoever finds the thread at its end may have come too late to be passed.
        return self._ended.is_set() or passed.acquire(timeout=waitable(timeout_s))

    def is_here(self) -> bool:
        """Whether this process has the thread; a forked child has not."""
        return self._process == os.getpid()

    def close(self) -> None:
        """Let the thread end once nothing is queued or expected; never blocks."""
        self._closing = True
        self.submit(lambda: None)

    def leave(self) -> None:
        """Let the thread end once nothing is queued."""
        self._leaving = True
        self.submit(lambda: None)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        # Each job in a call of its own: what it refers to does not live on while the thread waits.
        while not self._may_end():
            self._run_next()
        self._ended.set()
        while not self._jobs.empty():
            self._run_next()

    def _may_end(self) -> bool:
        return self._jobs.empty() and (self._leaving or (self._closing and not self._expected))

    def _run_next(self) -> None:
        job, batch = self._jobs.get()
        with ErrorsTo(self._note):
            job()
        self._expected.discard(batch)

    def _note(self, error: BaseException) -> None:
        self._counters.add("transfer_errors")
        log.error("cleanup of a transfer failed: %s", repr(error))
