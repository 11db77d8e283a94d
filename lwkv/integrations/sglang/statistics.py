"""What lwkv did, in SGLang's metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge

from lwkv.engine import CacheEngine

PREFIX = "sglang:lwkv_"
PERIOD_S = 1.0


class Statistics:
    """Counters and gauges of one worker, which SGLang serves with its own at /metrics.

    Args:
        labels: of every metric.
    """

    def __init__(
        self, engine: CacheEngine, labels: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._labels = labels
        self._clock = clock
        self._next = clock()
        self._metrics: dict[str, Any] = {}
        self._counted: dict[str, int] = {}

    def update(self) -> None:
        """Publish what has changed, once a second at most."""
        if self._clock() < self._next:
            return
        self._next = self._clock() + PERIOD_S
        counts = self._engine.counts()
        for name, value in self._engine.stats().items():
            # A histogram is served by `engine.metrics()` only.
            if "_le_" not in name and value != self._counted.get(name, 0):
                self._publish(name, value, gauge=name not in counts)
                self._counted[name] = value

    def _publish(self, name: str, value: int, gauge: bool) -> None:
        metric = self._metrics.get(name) or self._make(name, Gauge if gauge else Counter)
        self._metrics[name] = metric
        if gauge:
            metric.labels(**self._labels).set(value)
        else:
            metric.labels(**self._labels).inc(value - self._counted.get(name, 0))

    def _make(self, name: str, kind: type[Any]) -> Any:
        # Another linker of this process may have made it.
        made = REGISTRY._names_to_collectors.get(f"{PREFIX}{name}")
        return made or kind(f"{PREFIX}{name}", f"lwkv: {name.replace('_', ' ')}", [*self._labels])
