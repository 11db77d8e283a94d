"""How far chunks are from where prefixes end."""

from __future__ import annotations

from collections.abc import Collection, Iterator


class EndDistances:
    """For each chunk, how many chunks come behind it up to the nearest end of a prefix. Not thread-safe.

    0 where nothing is behind it. Distances of the largest bound and more are all that bound: a chunk that
    comes or goes takes time by it at most, however long the prefix is and however many go on from one chunk.

    Args:
        bounds: distances; `add` and `remove` return the chunks that are on the other side of one now.
    """

    def __init__(self, bounds: Collection[int]) -> None:
        self._farthest = max(bounds, default=0)
        # Of each distance, how many bounds it has reached.
        self._reached = [sum(bound <= near for bound in bounds) for near in range(self._farthest + 1)]
        self._before: dict[bytes, bytes] = {}
        # How many chunks at each distance are right behind a chunk, which may be here or not.
        self._behind: dict[bytes, dict[int, int]] = {}
        self._distances: dict[bytes, int] = {}  # of those with others behind them

    def of(self, chunk: bytes) -> int:
        return self._distances.get(chunk, 0)

    def alone_before(self, chunk: bytes) -> Iterator[bytes]:
        """The chunks before one, the nearest first, up to one behind which several are: without that."""
        before = self._before.get(chunk)
        while before is not None and sum(self._behind.get(before, {}).values()) < 2:
            yield before
            before = self._before.get(before)

    def add(self, chunk: bytes, before: bytes) -> list[bytes]:
        """Have a new chunk behind another; those that passed a bound, the nearest first."""
        self._before[chunk] = before
        return self._move(before, None, self.of(chunk))

    def remove(self, chunk: bytes) -> list[bytes]:
        """Forget what a chunk is behind; those that passed a bound, the nearest first."""
        before = self._before.pop(chunk, None)
        return self._move(before, self.of(chunk), None)

    def _move(self, chunk: bytes | None, old: int | None, new: int | None) -> list[bytes]:
        """Note that a chunk right behind `chunk` was at `old` and is at `new`; None where it is not there."""
        passed = []
        while chunk is not None and old != new:
            was = self._distances.get(chunk, 0)
            now = self._count(chunk, old, new)
            if self._reached[was] != self._reached[now]:
                passed.append(chunk)
            chunk, old, new = self._before.get(chunk), was, now
        return passed

    def _count(self, chunk: bytes, old: int | None, new: int | None) -> int:
        """The same for `chunk` alone; its distance now."""
        behind = self._behind.setdefault(chunk, {})
        if new is not None:
            behind[new] = behind.get(new, 0) + 1
        if old is not None:
            behind[old] -= 1
            if not behind[old]:
                del behind[old]
        if not behind:
            del self._behind[chunk], self._distances[chunk]
            return 0
        distance = self._distances[chunk] = min(self._farthest, 1 + min(behind))
        return distance
