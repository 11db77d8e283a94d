"""How long something is busy, with calls beside each other counted once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class BusyTime:
    """Bytes moved, and the seconds in which at least one call was under way. Thread-safe.

    Their quotient is the speed of the whole, whatever number of calls shared it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._calls = 0
        self._since = 0.0
        self._seconds = 0.0
        self._bytes = 0

    def begin(self) -> None:
        """A call begins."""
        with self._lock:
            if not self._calls:
                self._since = self._clock()
            self._calls += 1

    def end(self, num_bytes: int) -> None:
        """A call has ended that has moved so many bytes."""
        with self._lock:
            now = self._clock()
            self._seconds += now - self._since
            self._since = now
            self._calls -= 1
            self._bytes += num_bytes

    def totals(self) -> tuple[int, float]:
        """Bytes and seconds so far; calls that are still under way count when the next one ends."""
        with self._lock:
            return self._bytes, self._seconds
