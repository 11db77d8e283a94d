"""Which pages of a node's memory are free."""

from __future__ import annotations

import numpy as np

from lwkv.platforms.protocol import Int64s
from lwkv.pool.page_refcounts import longest_runs


class FreePages:
    """Free pages by their numbers. Not thread-safe.

    A node has millions of pages, nearly all of which are in use most of the time. So no call looks at pages
    that are in use: `take` takes time by those that are free, apart from those that never were in use.

    Args:
        span: pages of a slab, with which a run of neighbours ends.
        num_fresh: the last pages of all, which are free from the start.
    """

    def __init__(self, num_pages: int, span: int, num_fresh: int) -> None:
        self._num_pages = num_pages
        self._span = span
        self._fresh = num_pages - num_fresh  # pages from here on were never in use
        self._returned: list[Int64s] = []
        self._num_returned = 0

    def __len__(self) -> int:
        return self._num_returned + self._num_pages - self._fresh

    def give(self, pages: Int64s) -> None:
        """Take back `pages`, int64 (pages,)."""
        if len(pages):
            self._returned.append(pages)
            self._num_returned += len(pages)

    def withdraw(self, first: int, end: int) -> None:
        """Have none of the pages [first, end) any more, all of which are free, and were in use."""
        free = np.concatenate([np.zeros(0, np.int64), *self._returned])
        self._keep(free[(free < first) | (free >= end)])

    def take(self, count: int, end: int, near: tuple[int, int] | None = None) -> Int64s | None:
        """Take `count` pages below page `end`, in as few runs as can be; None where there are too few.

        Args:
            near: pages [first, end) of which as many are taken as can be.
        """
        if near is None and count <= min(end, self._num_pages) - self._fresh:
            self._fresh += count
            return np.arange(self._fresh - count, self._fresh)
        if count > self.below(end):
            return None
        free = self._sorted(end)
        positions = self._choose(free[: np.searchsorted(free, end)], count, near)
        pages: Int64s = free[positions]
        self._keep(np.delete(free, positions))
        return pages

    def below(self, end: int) -> int:
        """How many there are below page `end`."""
        if end >= self._num_pages:
            return len(self)
        returned = sum(int(np.count_nonzero(pages < end)) for pages in self._returned)
        return returned + max(0, end - self._fresh)

    def _choose(self, free: Int64s, count: int, near: tuple[int, int] | None) -> Int64s:
        """Positions of `count` of the free pages, as `longest_runs` has them."""
        if near is None:
            return longest_runs(free, self._span, count)
        first, end = np.searchsorted(free, near)
        if end - first >= count:
            inside: Int64s = first + longest_runs(free[first:end], self._span, count)
            return inside
        others = np.delete(np.arange(len(free)), slice(first, end))
        far = others[longest_runs(free[others], self._span, count - (end - first))]
        chosen: Int64s = np.concatenate([np.arange(first, end), far])
        return chosen

    def _sorted(self, end: int) -> Int64s:
        """All of them, ascending, but for those from page `end` on that were never in use."""
        fresh = np.arange(self._fresh, min(end, self._num_pages))
        self._fresh += len(fresh)
        free = np.concatenate([*self._returned, fresh])
        free.sort(kind="stable")
        return free

    def _keep(self, pages: Int64s) -> None:
        self._returned, self._num_returned = [pages], len(pages)
