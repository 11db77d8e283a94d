"""Which pages of the host pool are free."""

from __future__ import annotations

import numpy as np

from lwkv.platforms.protocol import Int64s


class FreeList:
    """Free page numbers, handed out in runs of neighbours, the longest first.

    A run never crosses a multiple of `span`, the number of pages of a slab: memory of two slabs is not
    contiguous. The runs are worked out when pages are taken, all at once: however small the pieces are,
    the time is that of looking over the free pages. Not thread-safe: the pool holds its lock.

    Args:
        num_pages: pages that there may be, numbered from 0; none is free at first.
    """

    def __init__(self, num_pages: int, span: int) -> None:
        self._is_free = np.zeros(num_pages, bool)
        self._span = span
        self.num_free = 0

    def give(self, pages: Int64s) -> None:
        """Add distinct pages that are not free."""
        self._is_free[pages] = True
        self.num_free += len(pages)

    def take(self, count: int) -> Int64s:
        """Remove `count` pages, which must be there, from as few runs as they fit; int64 (count,)."""
        if count > self.num_free:
            raise ValueError(f"asked for {count} free pages, there are {self.num_free}")
        free = np.flatnonzero(self._is_free)
        starts = np.append(0, np.flatnonzero((np.diff(free) != 1) | (free[1:] % self._span == 0)) + 1)
        lengths = np.diff(starts, append=len(free))
        order = np.argsort(-lengths, kind="stable")
        order = order[: np.searchsorted(np.cumsum(lengths[order]), count) + 1]
        starts, lengths = starts[order], lengths[order]
        before = np.cumsum(lengths) - lengths
        places = np.repeat(starts - before, lengths)[:count] + np.arange(count)
        pages: Int64s = free[places]
        self._is_free[pages] = False
        self.num_free -= count
        return pages
