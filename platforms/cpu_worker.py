"""The thread behind a stream of the CPU platform.

A place in a stream is a number: operation n is place n, and a mark (worker, n) is reached once the worker
is done with n operations. A late worker starts an operation only when a place at or behind it is demanded.
Marks name operations queued before them, so workers that wait for each other's marks never wait in a ring.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Literal

Operation = Callable[[], object]
Delay = Callable[[], float]
EXIT_SECONDS = 5.0


class Worker:
    """A queue of operations and the daemon thread that runs them in order.

    The thread starts with the first operation and ends after `end()`. An operation that raises stops the
    ones behind it; whoever reaches for a place at or behind it gets the error.
    """

    def __init__(self, name: str, delay: Delay | None) -> None:
        lock = threading.RLock()  # a finalizer may call end() on a thread that is inside
        self._work = threading.Condition(lock)
        self._progress = threading.Condition(lock)
        self._operations: deque[Operation] = deque()
        self._name, self._delay = name, delay
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._late = self._ending = False
        self._queued = self._done = self._demanded = 0
        self._failure: _Failure | None = None

    @property
    def late(self) -> bool:
        return self._late

    @late.setter
    def late(self, late: bool) -> None:
        with self._work:
            self._late = late
            self._work.notify()

    def put(self, operation: Operation) -> Mark:
        """Queue an operation; on the worker's own thread it is part of the one that runs, and runs now."""
        if self._is_own_thread():
            operation()
            return self.mark()
        self._check_process()
        with self._work:
            if self._ending:
                raise RuntimeError("this stream's platform was closed; make a new stream")
            self._start_thread()
            self._operations.append(operation)
            self._queued += 1
            self._work.notify()
            return Mark(self, self._queued)

    def mark(self) -> Mark:
        """The place behind all that is queued; on the worker's own thread, behind what runs now."""
        return Mark(self, self._done + 1 if self._is_own_thread() else self._queued)

    def is_done(self, place: int) -> bool:
        return self._done >= place

    def failure_at(self, place: int) -> _Failure | None:
        failure = self._failure
        return failure if failure is not None and failure.place <= place else None

    def reach(self, place: int) -> None:
        """Demand `place` and block until it is reached. Raises what an operation up to it raised."""
        if self._done < place and not self._runs(place):
            self._check_process()
            with self._work:
                self._demanded = max(self._demanded, place)
                self._work.notify()
                while self._done < place:
                    self._progress.wait()
        failure = self.failure_at(place)
        if failure is not None:
            raise failure.error.with_traceback(failure.traceback)

    def end(self) -> None:
        """Let the thread finish what is queued, late or not, and end; never blocks."""
        with self._work:
            self._ending = True
            self._work.notify()

    def join(self, seconds: float | None = None) -> None:
        if self._thread is not None and not self._is_own_thread() and self._process == os.getpid():
            self._thread.join(seconds)

    def _is_own_thread(self) -> bool:
        return self._thread is threading.current_thread()

    def _runs(self, place: int) -> bool:
        if not self._is_own_thread():
            return False
        if place > self._done + 1:
            raise RuntimeError("an operation waits for a later operation of its own stream")
        return True

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError("a stream does not survive a fork; make a new one in the child process")

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            # A daemon thread inside torch while the interpreter goes away can abort the process.
            atexit.register(self._leave)

    def _leave(self) -> None:
        self.end()
        self.join(EXIT_SECONDS)

    def _run(self) -> None:
        while (operation := self._next()) is not None:
            if self._failure is None:
                with _Guard(self):
                    self._wait_delay()
                    operation()
            del operation  # or its tensors live until the next one comes
            with self._progress:
                self._done += 1
                self._progress.notify_all()
        atexit.unregister(self._leave)

    def _wait_delay(self) -> None:
        if self._delay is not None:
            time.sleep(self._delay())

    def _next(self) -> Operation | None:
        with self._work:
            while not self._may_run():
                if self._ending and not self._operations:
                    return None
                self._work.wait()
            return self._operations.popleft()

    def _may_run(self) -> bool:
        held = self._late and not self._ending and self._demanded <= self._done
        return bool(self._operations) and not held

    def fail(self, error: BaseException, traceback: TracebackType | None) -> None:
        self._failure = _Failure(self._done + 1, error, traceback)


class Mark:
    """A place in a worker's queue, or one that is reached already."""

    __slots__ = ("_place", "_worker")

    def __init__(self, worker: Worker | None = None, place: int = 0) -> None:
        self._worker, self._place = worker, place

    def is_reached(self) -> bool:
        return self._worker is None or self._worker.is_done(self._place)

    def has_failed(self) -> bool:
        return self._worker is not None and self._worker.failure_at(self._place) is not None

    def reach(self) -> None:
        """Demand the place and block until it is reached. Raises what an operation before it raised."""
        if self._worker is not None:
            self._worker.reach(self._place)


class _Failure:
    __slots__ = ("error", "place", "traceback")

    def __init__(self, place: int, error: BaseException, traceback: TracebackType | None) -> None:
        self.place, self.error, self.traceback = place, error, traceback


class _Guard:
    """Hands whatever an operation raises to its worker: it belongs to those who wait for the operation."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[True]:
        if error is not None:
            self._worker.fail(error, traceback)
        return True
