"""Logs that an engine which starts waits for its owner: else nobody knew why it does not start."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

FIRST_S = 1.0
"""Seconds until the first line: an owner that is ready answers sooner."""

PERIOD_S = 30.0
"""Seconds from a line to the next."""


class WaitLog:
    """Counts from its making on.

    Args:
        path: where the owner listens.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._begun = clock()
        self._next = self._begun + FIRST_S

    def left(self) -> float:
        """Seconds until `note` has something to log."""
        return max(0.0, self._next - self._clock())

    def note(self, give_up_s: float) -> None:
        """Log that nobody has answered yet, if it is time; it is given up in `give_up_s` seconds."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + PERIOD_S
        log.warning(
            "host_memory: the owner at %s listens and has not answered for %.0f s: it is stopped, or has not "
            "taken all of its memory yet; this engine waits for %.0f s more",
            self._path,
            now - self._begun,
            max(0.0, give_up_s),
        )
