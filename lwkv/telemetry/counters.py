"""Counts of what happened, by name."""

from __future__ import annotations

import threading
from collections import Counter


class Counters:
    """Named totals that only grow; thread-safe."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._totals[name] += amount

    def totals(self) -> dict[str, int]:
        with self._lock:
            return dict(self._totals)
