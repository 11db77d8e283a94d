"""Calls to a lower tier, made on threads of their own for as long as the tier answers."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from lwkv.background.workers import Workers, cancel
from lwkv.telemetry.counters import Counters
from lwkv.telemetry.log_throttle import LogThrottle

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_REST_S = 1.0
DOUBLINGS = 6


class CircuitBreaker:
    """One kind of calls to one tier, which is skipped while it fails or does not answer.

    One error may be the fault of what was asked for; from the second in a row on, the tier is skipped for
    1 s, then 2, up to 64, and what is queued is not begun. While any call has been under way for `timeout_s`
    s no other is begun, so that a tier that hangs keeps no pages but those it has in hand. Both end by
    themselves.
    Time in the queue does not count: many calls are no outage. Thread-safe.

    Errors are counted, and logged by `throttle`, which several kinds of calls to one tier may share.
    """

    def __init__(
        self,
        tier: str,
        kind: str,
        num_threads: int,
        timeout_s: float,
        counters: Counters,
        clock: Callable[[], float],
        throttle: LogThrottle | None = None,
    ) -> None:
        self._throttle = throttle or LogThrottle(log, clock)
        self._tier = tier
        self._kind = kind
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        self._counters = counters
        self._clock = clock
        self._workers = Workers(f"{tier}-{kind}", num_threads)
        self._lock = threading.Lock()
        self._calls: dict[object, float | None] = {}  # since when each is under way, those queued last
        self._late = False
        self._failures = 0
        self._rest_until = clock()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call; the future is cancelled where the tier is skipped, and after `close`."""
        if not self.is_answering():
            self._counters.add(f"{self._tier}_skipped")
            return cancel(Future())
        token = object()
        with self._lock:
            has_thread = len(self._calls) < self._num_threads
            self._calls[token] = self._clock() if has_thread else None
        future = self._workers.submit(partial(self._run, token, call))
        future.add_done_callback(partial(self._ended, token))
        return future

    def is_answering(self) -> bool:
        """Whether a call would be made now; what is queued behind a late one is not begun."""
        with self._lock:
            now = self._clock()
            was_late, self._late = self._late, self._is_late(now)
            is_news = self._late and not was_late
            answering = not self._late and now >= self._rest_until
        if is_news:
            self._counters.add(f"{self._tier}_timeouts")
            self._skip_queued()
            log.warning(
                "tier %s: no answer to a %s within %g s: skipped until it answers",
                self._tier,
                self._kind,
                self._timeout_s,
            )
        return answering

    @property
    def is_resting(self) -> bool:
        """Whether no call would be made now; for those who only look, nothing changes."""
        with self._lock:
            now = self._clock()
            return self._is_late(now) or now < self._rest_until

    @property
    def rests_until(self) -> float:
        """When the next call may be made, by the clock; infinity for as soon as a late one has ended."""
        with self._lock:
            return math.inf if self._is_late(self._clock()) else self._rest_until

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until every call has ended; False if that took longer than `timeout_s` seconds."""
        return self._workers.wait_idle(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Let all calls end; False if that took over `timeout_s` seconds, which cancels those not begun."""
        ended = self._workers.close(timeout_s)
        self._workers.cancel_queued()
        return ended

    def _is_late(self, now: float) -> bool:
        oldest = next((since for since in self._calls.values() if since is not None), now)
        return now - oldest >= self._timeout_s

    def _run(self, token: object, call: Callable[[], T]) -> T:
        with self._lock:
            if self._calls[token] is None:
                self._calls[token] = self._clock()
        return call()

    def _ended(self, token: object, call: Future[Any]) -> None:
        error = None if call.cancelled() else call.exception()
        rests = False
        with self._lock:
            del self._calls[token]
            if error is not None:
                rests = self._count_failure()
            elif not call.cancelled():
                self._failures = 0
        if error is not None:
            self._counters.add(f"{self._tier}_errors")
            # A server that is down fails look-ups, reads and writes, several at a time.
            self._throttle.warn(
                "tier %s: %s failed: %s: %s", self._tier, self._kind, type(error).__name__, error
            )
        if rests:
            self._skip_queued()

    def _skip_queued(self) -> None:
        if skipped := self._workers.cancel_queued():
            self._counters.add(f"{self._tier}_skipped", skipped)

    def _count_failure(self) -> bool:
        """Whether the tier is skipped from now on."""
        now = self._clock()
        # Calls that had begun before it was skipped say nothing new.
        if now < self._rest_until:
            return False
        self._failures += 1
        if self._failures == 1:
            return False
        self._rest_until = now + FIRST_REST_S * 2 ** min(self._failures - 2, DOUBLINGS)
        return True
