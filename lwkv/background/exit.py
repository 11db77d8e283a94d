"""Threads of the background are given a moment to end before the interpreter goes away."""

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

    A daemon thread that is inside torch while the interpreter goes away can abort the process.
    """
    _ends_at_exit().add(thing)


@functools.cache
def _ends_at_exit() -> weakref.WeakSet[EndsAtExit]:
    ending_things: weakref.WeakSet[EndsAtExit] = weakref.WeakSet()
    atexit.register(_leave, ending_things, os.getpid())
    return ending_things


def _leave(ending_things: weakref.WeakSet[EndsAtExit], process: int) -> None:
    if os.getpid() != process:
        return  # the threads stayed in the parent process, their locks may be held for ever
    deadline = time.monotonic() + EXIT_SECONDS
    ending = list(ending_things)
    for thing in ending:
        thing.leave()
    for thing in ending:
        thing.join(waitable(deadline - time.monotonic()))
