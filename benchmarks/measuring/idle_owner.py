"""How long an owner of host memory that has been idle takes to pin."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

IDLE_S = 0.02
"""As long as a load, in which the owner sleeps."""

ANNOUNCED_S = 0.0003
"""By how much a load announces that it pins: it checks slots and makes keys meanwhile."""

T = TypeVar("T")


def timed_pin(pin: Callable[[], T], announce: Callable[[], object] | None = None) -> tuple[float, T]:
    """Milliseconds of a pin, and what was pinned; where `announce` is given, it is announced before."""
    time.sleep(IDLE_S)
    until = time.perf_counter()
    if announce is not None:
        announce()
        until = time.perf_counter() + ANNOUNCED_S
    while (begun := time.perf_counter()) < until:
        pass
    pinned = pin()
    return 1e3 * (time.perf_counter() - begun), pinned
