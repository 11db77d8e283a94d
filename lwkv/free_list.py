"""Which pages of the host pool are free."""

from __future__ import annotations

import numpy as np

from lwkv.platforms.protocol import Int64s


class FreeList:
    """Free page numbers, handed out as neighbours where there are such, else in as few runs as they fit.

    A run ends with its slab, at a multiple of `span`: memory of two slabs is not contiguous. Runs are worked
    out when pages are taken, all at once: however small the pieces are, the time is that of looking over the
    free pages. Not thread-safe: the pool holds its lock.

    Args:
        num_pages: pages that there are, numbered from 0; none is free at first.
    """

    def __init__(self, num_pages: int, span: int) -> None:
        self._is_free = np.zeros(num_pages, bool)
        self._span = span
        self._next = 0
        self.num_free = 0

    def grow(self, num_pages: int) -> None:
        """Let there be `num_pages`, no fewer than before; those that are new are not free yet."""
        self._is_free = np.append(self._is_free, np.zeros(num_pages - len(self._is_free), bool))

    def give(self, pages: Int64s) -> None:
        """Add distinct pages that are not free."""
        self._is_free[pages] = True
        self.num_free += len(pages)

    def take(self, count: int) -> Int64s:
        """Remove `count` pages, which must be there; int64 (count,)."""
        if count > self.num_free:
            raise ValueError(f"asked for {count} free pages, there are {self.num_free}")
        pages = self._take_next(count)
        if pages is None:
            pages = self._take_longest(count)
        self._is_free[pages] = False
        self.num_free -= count
        return pages

    def _take_next(self, count: int) -> Int64s | None:
        """The pages behind those taken last, if they are free and no slab need end between them."""
        for start in (self._next, 0):
            window = self._is_free[start : start + count]
            in_a_slab = start % self._span + count <= self._span
            if len(window) == count and (in_a_slab or count > self._span) and window.all():
                self._next = start + count
                return np.arange(start, start + count)
        return None

    def _take_longest(self, count: int) -> Int64s:
        free = self._is_free.nonzero()[0]
        starts = np.append(0, ((free[1:] - free[:-1] != 1) | (free[1:] % self._span == 0)).nonzero()[0] + 1)
        lengths = np.diff(starts, append=len(free))
        order = np.argsort(-lengths, kind="stable")
        order = order[: np.searchsorted(np.cumsum(lengths[order]), count) + 1]
        starts, lengths = starts[order], lengths[order]
        before = np.cumsum(lengths) - lengths
        pages: Int64s = free[np.repeat(starts - before, lengths)[:count] + np.arange(count)]
        self._next = int(pages[-1]) + 1 if count else self._next
        return pages
