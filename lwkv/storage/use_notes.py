"""What a tier that is Ordered has yet to learn of which prompts were used."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from lwkv.keys import ChunkKey
from lwkv.storage.circuit_breaker import CircuitBreaker
from lwkv.storage.tier import Ordered
from lwkv.telemetry.counters import Counters
from lwkv.telemetry.log_throttle import LogThrottle

MOST_NOTES = 64
"""Prompts that wait: a tier that is slower than prompts are used learns of those used last."""


class UseNotes:
    """Lets a tier know on a thread of its own which prompts are used. Thread-safe; never blocks.

    Of prompts that wait for a slow tier the oldest are dropped, and counted as "<tier>_notes_dropped".
    """

    def __init__(
        self,
        tier: Ordered,
        name: str,
        timeout_s: float,
        counters: Counters,
        clock: Callable[[], float],
        throttle: LogThrottle | None = None,
    ) -> None:
        self.calls = CircuitBreaker(name, "note of use", 1, timeout_s, counters, clock, throttle)
        self._tier = tier
        self._name = name
        self._timeout_s = timeout_s
        self._counters = counters
        self._waiting: deque[Sequence[ChunkKey]] = deque()
        self._lock = threading.Lock()

    def add(self, prompt: Sequence[ChunkKey]) -> None:
        """Let the tier know that a prompt is used that begins with these chunks."""
        with self._lock:
            self._waiting.append(prompt)
            is_surplus = len(self._waiting) > MOST_NOTES
            if is_surplus:
                self._waiting.popleft()
        if is_surplus:
            self._counters.add(f"{self._name}_notes_dropped")
            return  # there is a call for each of the others
        self.calls.submit(self._follow_next).add_done_callback(self._ended)

    def _follow_next(self) -> None:
        self._tier.follow(self._take(), self._timeout_s)

    def _ended(self, call: Future[None]) -> None:
        if call.cancelled():  # the tier is skipped
            self._take()

    def _take(self) -> Sequence[ChunkKey]:
        with self._lock:
            return self._waiting.popleft()
