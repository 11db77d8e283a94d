"""Threads of the background are given a moment to end before the interpreter exits."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from typing import Protocol

EXIT_SECONDS = 5.0


class EndsAtExit(Protocol):
    """Something with daemon threads of its own."""

    def leave(self) -> None:
        """Have the threads end after what they run now; never blocks for it."""

    def join(self, seconds: float) -> None:
        """Block until the threads have ended, `seconds` at most."""


def waitable(seconds: float) -> float:
    """`seconds` as something that can be waited for: not below 0, and no more than the system can count."""
    return max(0.0, min(seconds, threading.TIMEOUT_MAX))


def end_at_exit(thing: EndsAtExit) -> None:
    """Let `thing` end at the interpreter's exit, in `EXIT_SECONDS` together with all others.

    A daemon thread that is inside torch while the interpreter exits can abort the process. So this comes
    before the first thread starts; where the exit has begun, `thing` leaves at once and must start none.
    """
    _exit_of(os.getpid()).add(thing)


def is_exiting() -> bool:
    """Whether the interpreter's exit has begun: threads of the background end, and no more should start."""
    return _exit_of(os.getpid()).has_begun


class _Exit:
    """All that ends at the exit of one process, and whether that has begun. A forked child has its own."""

    def __init__(self, process: int) -> None:
        self._things: weakref.WeakSet[EndsAtExit] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._process = process
        self.has_begun = False

    def add(self, thing: EndsAtExit) -> None:
        with self._lock:
            self._things.add(thing)
            has_begun = self.has_begun
        if has_begun:
            thing.leave()

    def run(self) -> None:
        if self._process != os.getpid():
            return  # the threads stayed in the parent process, their locks may be held for ever
        deadline = time.monotonic() + EXIT_SECONDS
        with self._lock:
            self.has_begun = True
        while ending := self._take():
            for thing in ending:
                thing.leave()
            for thing in ending:
                thing.join(waitable(deadline - time.monotonic()))

    def _take(self) -> list[EndsAtExit]:
        """Those that came since the last time: what ends may have made others, with threads of their own."""
        with self._lock:
            things = list(self._things)
            self._things.clear()
        return things


@functools.cache
def _exit_of(process: int) -> _Exit:
    made = _Exit(process)
    atexit.register(made.run)
    return made
