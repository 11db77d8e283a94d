"""Times as medians over repeats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from lwkv.platforms import Platform


def median_ms(
    platform: Platform,
    device: torch.device,
    work: Callable[[], object],
    repeats: int = 7,
    before: Callable[[], object] | None = None,
) -> float:
    """Milliseconds from the call of `work` until the device is idle; one run before is not counted.

    `before` runs, and ends on the device, outside the time.
    """
    times = []
    for _ in range(repeats + 1):
        if before is not None:
            before()
        platform.synchronize_device(device)
        start = time.perf_counter()
        work()
        platform.synchronize_device(device)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])


def gb_per_s(num_bytes: int, ms: float) -> float:
    """Gigabytes (1e9 bytes) a second."""
    return num_bytes / ms / 1e6
