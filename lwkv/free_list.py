"""Which pages of the host pool are free, kept as runs of neighbours."""

from __future__ import annotations

import heapq

SPARE_ENTRIES = 64


class FreeList:
    """Runs of free page numbers, the longest handed out first.

    A run never crosses a multiple of `span`, the number of pages of a slab: memory of two slabs is
    not contiguous. Not thread-safe: the pool holds its lock.
    """

    def __init__(self, span: int) -> None:
        self._span = span
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        # Longest first; entries whose run has changed since are skipped when popped.
        self._heap: list[tuple[int, int]] = []
        self.num_free = 0

    def give(self, start: int, end: int) -> None:
        """Add the pages [start, end), all of one slab, joining them with free neighbours."""
        self.num_free += end - start
        if start % self._span and (before := self._start_of.pop(start, None)) is not None:
            del self._end_of[before]
            start = before
        if end % self._span and (after := self._end_of.pop(end, None)) is not None:
            del self._start_of[after]
            end = after
        self._put(start, end)

    def take(self, count: int) -> list[tuple[int, int]]:
        """Remove `count` pages, which must be there, as few runs [start, end)."""
        if count > self.num_free:
            raise ValueError(f"asked for {count} free pages, there are {self.num_free}")
        runs = []
        while count:
            start, end = self._pop_longest()
            cut = min(end, start + count)
            if cut < end:
                self._put(cut, end)
            runs.append((start, cut))
            count -= cut - start
            self.num_free -= cut - start
        return runs

    def _put(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
        heapq.heappush(self._heap, (start - end, start))
        if len(self._heap) > 2 * len(self._end_of) + SPARE_ENTRIES:
            self._drop_outdated()

    def _drop_outdated(self) -> None:
        self._heap = [(start - end, start) for start, end in self._end_of.items()]
        heapq.heapify(self._heap)

    def _pop_longest(self) -> tuple[int, int]:
        while True:
            negative_length, start = heapq.heappop(self._heap)
            end = start - negative_length
            if self._end_of.get(start) == end:
                del self._end_of[start], self._start_of[end]
                return start, end
