"""The thread behind a stream of the CPU platform.

A place in a stream is a number: operation n is place n, and the place is reached once the worker is done
with n operations. A late worker starts an operation only when a place at or behind it is demanded. Who
waits names operations queued before the wait, so workers that wait for each other never wait in a ring.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Literal

from lwkv.background.exit import end_at_exit

Operation = Callable[[], object]
Delay = Callable[[], float]


class Outcome:
    """What the first operation that raised has left for those who wait behind it.

    A stream and its marks own it, its worker does not: the error's frames often hold the stream, which
    must stay droppable for its thread to end.
    """

    def __init__(self) -> None:
        self._failure: tuple[int, BaseException, TracebackType | None] | None = None

    def fail(self, place: int, error: BaseException, traceback: TracebackType | None) -> None:
        self._failure = (place, error, traceback)

    def has_failed(self, place: int) -> bool:
        return self._failure is not None and self._failure[0] <= place

    def check(self, place: int) -> None:
        """Raise the error if it came at or before `place`."""
        if self._failure is not None and self._failure[0] <= place:
            raise self._failure[1].with_traceback(self._failure[2])


class StreamThread(threading.Thread):
    """A thread that runs the operations of a stream. Whatever else comes to it, it must not wait for streams:
    the collector may finalize anything there, inside an operation that these are waiting for."""

    @staticmethod
    def is_current() -> bool:
        return isinstance(threading.current_thread(), StreamThread)


class Worker:
    """A queue of operations and the daemon thread that runs them in order.

    The thread starts with the first operation and ends after `end()`. After an operation that raises, the
    ones behind it are passed over.
    """

    def __init__(self, name: str, delay: Delay | None, outcome: Outcome) -> None:
        lock = threading.RLock()  # a finalizer may call end() on a thread that is inside
        self._work = threading.Condition(lock)
        self._progress = threading.Condition(lock)
        self._operations: deque[Operation] = deque()
        self._name, self._delay = name, delay
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._late = self._ending = self._failed = False
        self._queued = self._done = self._demanded = 0
        self._outcome = weakref.ref(outcome)
        end_at_exit(self)

    @property
    def late(self) -> bool:
        return self._late

    @late.setter
    def late(self, late: bool) -> None:
        with self._work:
            self._late = late
            self._work.notify()

    def put(self, operation: Operation) -> int:
        """Queue an operation and give its place; on the worker's own thread it runs now, as part of the
        one that runs."""
        if self._is_own_thread():
            operation()
            return self.place()
        return self.put_behind(operation)

    def put_behind(self, operation: Operation) -> int:
        """Queue an operation behind all others, on whatever thread, and give its place."""
        self._check_process()
        with self._work:
            if self._ending:
                raise RuntimeError("this stream's platform was closed; make a new stream")
            self._start_thread()
            self._operations.append(operation)
            self._queued += 1
            self._work.notify()
            return self._queued

    def place(self) -> int:
        """The place behind all that is queued; on the worker's own thread, behind what runs now."""
        return self._done + 1 if self._is_own_thread() else self._queued

    def is_done(self, place: int) -> bool:
        return self._done >= place

    def reach(self, place: int) -> None:
        """Demand `place` and block until it is reached."""
        if self._done >= place or self._runs(place):
            return
        self._check_process()
        with self._work:
            self._demanded = max(self._demanded, place)
            self._work.notify()
            while self._done < place:
                self._progress.wait()

    def finish(self) -> None:
        """Block until all that is queued now is done. Raises what an operation of a live stream raised."""
        place = self.place()
        self.reach(place)
        outcome = self._outcome()
        if outcome is not None:
            outcome.check(place)

    def end(self) -> None:
        """Let the thread finish what is queued, late or not, and end; never blocks."""
        if self._process != os.getpid():
            return  # the thread stayed in the parent process, its lock may be held for ever
        with self._work:
            self._ending = True
            self._work.notify()

    def leave(self) -> None:
        """As `end`, at the interpreter's exit."""
        self.end()

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
            self._thread = StreamThread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (operation := self._next()) is not None:
            if not self._failed:
                with _Guard(self):
                    self._wait_delay()
                    operation()
            del operation  # or its tensors live until the next one comes
            with self._progress:
                self._done += 1
                self._progress.notify_all()

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
        outcome = self._outcome()
        if outcome is not None:
            outcome.fail(self._done + 1, error, traceback)
        self._failed = True


class _Guard:
    """Hands whatever an operation raises to its worker: it belongs to those who wait for the operation."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[True]:
        if error is not None and traceback is not None:
            self._worker.fail(error, traceback.tb_next)  # from the operation on, without the worker's frame
        return True
