"""Times as medians over repeats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from lwkv.platforms import Platform

Work = Callable[[], object]


def alternate_ms(
    platform: Platform,
    device: torch.device,
    works: Sequence[Work],
    repeats: int = 7,
    before: Work | None = None,
) -> list[list[float]]:
    """Time each work once a round: what drifts, such as a device's clock, drifts for all of them.

    Returns for each work the milliseconds from its call until the device is idle, one a round; one round
    before is not counted. `before` runs before each work, and ends on the device, outside the time.
    """
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats + 1):
        for work, taken in zip(works, times, strict=True):
            if before is not None:
                before()
            platform.synchronize_device(device)
            start = time.perf_counter()
            work()
            platform.synchronize_device(device)
            taken.append((time.perf_counter() - start) * 1e3)
    return [taken[1:] for taken in times]


def median_ms(
    platform: Platform,
    device: torch.device,
    work: Work,
    repeats: int = 7,
    before: Work | None = None,
) -> float:
    """Milliseconds from the call of `work` until the device is idle; otherwise as `alternate_ms`."""
    (taken,) = alternate_ms(platform, device, [work], repeats, before)
    return statistics.median(taken)


def median_ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """The median of the ratios of one round each."""
    return statistics.median(time / other for time, other in zip(times, base, strict=True))


def gb_per_s(num_bytes: int, ms: float) -> float:
    """Gigabytes (1e9 bytes) a second."""
    return num_bytes / ms / 1e6


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of `values` is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
