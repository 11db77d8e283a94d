"""How fast each tier below host memory brings chunks to each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from lwkv.integrations.vllm.scheduler.lookup.measured.speeds import Speed, is_old

WHOLE_READ = 4.0
"""Chunks that are read of a tier from which on a measurement counts as a whole one."""


class TierSpeeds:
    """What was measured of lower tiers, by name and rank. The slowest rank counts: all must have a chunk.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._speeds: defaultdict[str, dict[int, Speed]] = defaultdict(dict)
        self._late: dict[str, float] = {}

    def add(self, tier: str, rank: int, num_chunks: float, seconds: float) -> None:
        """Take over what a rank has read."""
        speed = self._speeds[tier].setdefault(rank, Speed(self._clock, WHOLE_READ))
        speed.add(num_chunks, seconds)

    def note_late(self, tiers: Iterable[str], moved_at: float) -> None:
        """Note tiers that were waited for in vain; they brought something last at that time."""
        self._late |= dict.fromkeys(tiers, moved_at)

    def chunk_s(self, tier: str) -> float:
        """Seconds until every rank has read a chunk; 0 before anything was measured."""
        speeds = [speed.seconds_each for speed in self._speeds[tier].values()]
        return float("inf") if self.is_late(tier) else max(speeds, default=0.0)

    def is_old(self, tier: str) -> bool:
        """Whether no rank has read from a tier of late."""
        return all(is_old(speed, self._clock()) for speed in self._speeds[tier].values())

    def is_late(self, tier: str) -> bool:
        """Whether some rank has read nothing from a tier since it was waited for in vain."""
        measured = [speed.measured_at or 0.0 for speed in self._speeds[tier].values()]
        since = self._late.get(tier)
        return since is not None and (not measured or min(measured) <= since)

    def per_second(self) -> dict[tuple[str, int], int]:
        """Chunks a second, by the name of a gauge and rank."""
        return {
            (f"{tier}_chunks_per_s", rank): speed.per_second
            for tier, speeds in self._speeds.items()
            for rank, speed in speeds.items()
        }
