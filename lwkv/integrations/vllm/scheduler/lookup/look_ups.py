"""Look-ups into tiers below host memory, for which the scheduler does not wait."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from lwkv.background.workers import Workers

T = TypeVar("T")

FAST_S = 0.002
"""Seconds that a look-up into lower tiers may hold a step up; a request whose takes longer waits for it."""


class LookUps:
    """Runs them one after the other, on a thread of its own."""

    def __init__(self) -> None:
        self._thread = Workers("scheduler-look-up", 1)
        self._last: Future[Any] | None = None

    def begin(self, look_up: Callable[[], T]) -> Future[T]:
        """Begin one; where none is under way, a fast one has answered on return."""
        is_idle = self._last is None or self._last.done()
        self._last = future = self._thread.submit(look_up)
        if is_idle:
            wait([future], FAST_S)
        return future

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no look-up is under way; False if that takes over `timeout_s`."""
        return self._thread.wait_idle(timeout_s)

    def close(self) -> None:
        """End the thread."""
        self._thread.leave()
