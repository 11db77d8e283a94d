"""Tiers that fail now and then while an engine is asked."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping

# What begins a fault, and what ends it.
Fault = tuple[Callable[[], object], Callable[[], object]]


class Trouble:
    """Has one of `faults` happen now and then, drawn by a seed, and end again, on a thread of its own.

    Args:
        quiet_s, lasting_s: the least and most seconds between faults, and of a fault.

    Attributes:
        done: how often each has happened, by its name.
    """

    def __init__(
        self,
        faults: Mapping[str, Fault],
        seed: int,
        quiet_s: tuple[float, float],
        lasting_s: tuple[float, float],
    ) -> None:
        self._faults = faults
        self._random = random.Random(seed)
        self._quiet_s, self._lasting_s = quiet_s, lasting_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.done: Counter[str] = Counter()

    def __enter__(self) -> Trouble:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self._random.uniform(*self._quiet_s)):
            kind = self._random.choice(tuple(self._faults))
            self.done[kind] += 1
            begin, end = self._faults[kind]
            begin()
            self._end.wait(self._random.uniform(*self._lasting_s))
            end()
