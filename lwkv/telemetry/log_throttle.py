"""Log lines about what may go on happening for hours."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

PERIOD_S = 60.0


class LogThrottle:
    """Warns at most once in `PERIOD_S` seconds and reports how many were left out since. Thread-safe.

    Counters have the totals: a line a request would only bury them.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._silent_until = clock()
        self._left_out = 0
        self._lock = threading.Lock()

    def warn(self, text: str, *values: object) -> None:
        """Log `text % values`, or count it as left out."""
        with self._lock:
            now = self._clock()
            if now < self._silent_until:
                self._left_out += 1
                return
            self._silent_until = now + PERIOD_S
            left_out, self._left_out = self._left_out, 0
        more = f" ({left_out} more lines like this were left out)" if left_out else ""
        self._log.warning(text + more, *values)
