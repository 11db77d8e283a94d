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


class Leaver(Protocol):
    """Something with daemon threads of its own."""

    def leave(self) -> None:
        """Have the threads end after what they run now; never blocks for it."""

    def join(self, seconds: float) -> None:
        """Block until the threads have ended, `seconds` at most."""


def waitable(seconds: float) -> float:
    """`seconds` as something that can be waited for: not below 0, and no more than the system can count."""
    return max(0.0, min(seconds, threading.TIMEOUT_MAX))


def end_at_exit(leaver: Leaver) -> None:
    """Let `leaver` end at the interpreter's exit, in `EXIT_SECONDS` together with all others.

    A daemon thread that is inside torch while the interpreter goes away can abort the process.
    """
    _leavers().add(leaver)


@functools.cache
def _leavers() -> weakref.WeakSet[Leaver]:
    leavers: weakref.WeakSet[Leaver] = weakref.WeakSet()
    atexit.register(_leave, leavers, os.getpid())
    return leavers


def _leave(leavers: weakref.WeakSet[Leaver], process: int) -> None:
    if os.getpid() != process:
        return  # the threads stayed in the parent process, their locks may be held for ever
    deadline = time.monotonic() + EXIT_SECONDS
    ending = list(leavers)
    for leaver in ending:
        leaver.leave()
    for leaver in ending:
        leaver.join(waitable(deadline - time.monotonic()))
