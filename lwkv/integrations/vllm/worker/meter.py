"""What a worker's engine counts, step by step, for vLLM's log and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from lwkv.telemetry.counters import Counters

QUIET_S = 1.0
"""Seconds between two reports of steps that move nothing: uploads and evictions go on beside them."""

GAUGES = ("host_used_bytes", "host_capacity_bytes")
RANK_MARK = "/rank"


def rank_gauge(name: str, rank: int) -> str:
    """What a gauge of one rank is called until those of all ranks are added up."""
    return f"{name}{RANK_MARK}{rank}"


def summed_over_ranks(numbers: Mapping[str, int]) -> dict[str, int]:
    """`numbers` with the gauges of all ranks added up under their own names."""
    summed: dict[str, int] = {}
    for name, number in numbers.items():
        name = name.partition(RANK_MARK)[0]
        summed[name] = summed.get(name, 0) + number
    return summed


class Counting(Protocol):
    """An engine that counts; see CacheEngine."""

    def counts(self) -> dict[str, int]: ...

    def stats(self) -> dict[str, int]: ...


class WorkerMeter:
    """Gives out what was counted since the last report, and the gauges of this rank.

    A gauge is called `<name>/rank<number>`, so that those of several ranks stay apart until they are shown.

    Args:
        counters: of the worker itself.
    """

    def __init__(self, engine: Counting, rank: int, counters: Counters, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._rank = rank
        self._counters = counters
        self._clock = clock
        self._counted: dict[str, int] = {}
        self._quiet_until = clock()

    def new_counts(self, moves_anything: bool) -> dict[str, int]:
        """What is new; nothing, now and then, in steps that move nothing."""
        now = self._clock()
        if not moves_anything and now < self._quiet_until:
            return {}
        self._quiet_until = now + QUIET_S
        # A histogram is for Prometheus' own means only.
        counts = {name: count for name, count in self._engine.counts().items() if "_le_" not in name}
        counts |= self._counters.totals()
        before, self._counted = self._counted, counts
        news = {name: more for name in counts if (more := counts[name] - before.get(name, 0))}
        stats = self._engine.stats()
        return news | {rank_gauge(name, self._rank): stats[name] for name in GAUGES}
