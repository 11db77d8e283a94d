"""Which chunk files this process is writing now: when they are complete, they can make room for others."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection


class Drafts:
    """Names of chunk files that are being written. Thread-safe."""

    def __init__(self) -> None:
        self._names: Counter[str] = Counter()
        self._change = threading.Condition()
        self.num_ended = 0

    def __bool__(self) -> bool:
        return bool(self._names)

    def begin(self, name: str) -> None:
        with self._change:
            self._names[name] += 1

    def end(self, name: str) -> None:
        """One file is complete, or given up."""
        with self._change:
            self._names -= Counter([name])
            self.num_ended += 1
            self._change.notify_all()

    def has_others(self, names: Collection[str]) -> bool:
        """Whether any is being written that is none of `names`."""
        with self._change:
            return any(name not in names for name in self._names)

    def wait_for_another(self, num_ended: int, spared: Collection[str], deadline: float) -> bool:
        """Block until more than `num_ended` files have ended; `deadline` is of time.monotonic.

        False where none is being written but `spared`, or not before the deadline.
        """
        with self._change:
            while self.num_ended == num_ended:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self.has_others(spared):
                    return False
                self._change.wait(left_s)
            return True
