"""The last gauges of a tier: reading them never waits for the tier."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from lwkv.background.exit import waitable
from lwkv.storage.circuit_breaker import CircuitBreaker
from lwkv.storage.tier import Gauged, Tier
from lwkv.telemetry.counters import Counters


class TierGauges:
    """The gauges of one tier, which is asked on a thread of its own. Thread-safe.

    Last values are kept until there are new ones, also while the tier fails or hangs.
    """

    def __init__(self, tier: Tier, timeout_s: float, counters: Counters, clock: Callable[[], float]) -> None:
        self._tier = tier if isinstance(tier, Gauged) else None
        self._timeout_s = timeout_s
        self._calls = CircuitBreaker(tier.name, "gauge", 1, timeout_s, counters, clock)
        self._known: dict[str, int] = {}
        self._asked: Future[None] | None = None
        self.wait_new(timeout_s)

    def known(self) -> dict[str, int]:
        """The tier's last numbers, by name. It is asked again, for the next call."""
        if self._asked is None or self._asked.done():
            self._ask()
        return dict(self._known)

    def wait_new(self, timeout_s: float) -> None:
        """Block until the tier has returned its present numbers, `timeout_s` seconds at most."""
        deadline = time.monotonic() + min(timeout_s, self._timeout_s)
        # What is under way may have been answered before this call.
        for asked in (self._asked, self._ask()):
            if asked is not None:
                wait([asked], waitable(deadline - time.monotonic()))

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until the tier is not being asked; False if that took longer than `timeout_s` seconds."""
        return self._calls.wait_idle(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Ask no more; False if the call under way took longer than `timeout_s` seconds."""
        return self._calls.close(timeout_s)

    def _ask(self) -> Future[None] | None:
        if self._tier is None:
            return None
        self._asked = self._calls.submit(self._take)
        return self._asked

    def _take(self) -> None:
        if self._tier is not None:
            self._known = dict(self._tier.gauges())
