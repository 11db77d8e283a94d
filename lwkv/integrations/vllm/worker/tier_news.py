"""What has changed in the tiers below host memory since the last report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol


class ReadTiers(Protocol):
    """See StorageManager."""

    def unread_tiers(self) -> dict[str, float]: ...

    def read_times(self) -> dict[str, tuple[int, float]]: ...


class TierNews:
    """Gives out each change once.

    Args:
        clock: seconds, that of the tiers.
    """

    def __init__(self, tiers: ReadTiers, clock: Callable[[], float]) -> None:
        self._tiers = tiers
        self._clock = clock
        self._unread: dict[str, float] = {}
        self._read: dict[str, tuple[int, float]] = {}

    def unread(self) -> Mapping[str, float] | None:
        """The tiers that loads skip, and for how many seconds; None where nothing has changed."""
        unread = self._tiers.unread_tiers()
        before, self._unread = self._unread, unread
        if unread == before:
            return None
        now = self._clock()
        return {name: until - now for name, until in unread.items()}

    def reads(self) -> Mapping[str, tuple[int, float]]:
        """Bytes that were read from each tier since the last call, and in how many seconds."""
        before, self._read = self._read, self._tiers.read_times()
        reads = {name: (total, *before.get(name, (0, 0.0))) for name, total in self._read.items()}
        return {name: (now[0] - size, now[1] - s) for name, (now, size, s) in reads.items() if now[0] > size}
