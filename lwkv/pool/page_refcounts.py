"""Which pages of the host pool are in use, how often, and which are handed out next."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lwkv.platforms import Int64s


class PageRefcounts:
    """The reference count of every page; pages without a reference are free.

    They are handed out as neighbours where there are such, else in as few runs as they fit. A run ends with
    its slab, at a multiple of `span`: memory of two slabs is not contiguous. Runs are worked out when pages
    are taken, all at once: however small the pieces are, the time is that of looking over the pages. Not
    thread-safe: the pool holds its lock.

    Args:
        span: pages of a slab.
    """

    def __init__(self, span: int) -> None:
        self._room = np.zeros(1, np.int32)
        # One more than there are pages, always 0: it stands for all numbers that no page has.
        self._counts = self._room
        self._span = span
        self._next = 0
        self.num_free = 0

    @property
    def total(self) -> int:
        """Sum of all counts."""
        return int(self._counts.sum())

    def grow(self, num_pages: int) -> None:
        """Let there be so many pages more, all free."""
        length = len(self._counts) + num_pages
        if length > len(self._room):
            # Room for twice as many: a pool of many slabs would copy all counts with each of them.
            self._room = np.zeros(2 * length, np.int32)
            self._room[: len(self._counts)] = self._counts
        self._counts = self._room[:length]
        self.num_free += num_pages

    def take(self, count: int) -> Int64s:
        """Give `count` pages, no more than are free, one reference each; int64 (count,)."""
        pages = self._next_pages(count)
        if pages is None:
            pages = self._longest_runs(count)
        self._counts[pages] = 1
        self.num_free -= count
        return pages

    def add(self, pages: Int64s) -> None:
        """Add one reference to each of `pages`, each named once, in use or not."""
        counts = self._counts[pages]
        self.num_free -= len(pages) - int(np.count_nonzero(counts))
        self._counts[pages] = counts + 1

    def are_used(self, first: int, end: int) -> bool:
        """Whether any of the pages [first, end) has a reference."""
        return bool(self._counts[first:end].any())

    def num_used(self, first: int, end: int) -> int:
        """How many of the pages [first, end) have references."""
        return int(np.count_nonzero(self._counts[first:end]))

    def shared(self, pages: Int64s) -> npt.NDArray[np.bool_]:
        """Which of `pages`, of any shape, have several references."""
        several: npt.NDArray[np.bool_] = self._counts[pages] > 1
        return several

    def share(self, pages: Int64s) -> None:
        """Add one reference to each of `pages`. Raises ValueError as `release`."""
        pages, counts = self._require_used(pages)
        self._counts[pages] = counts + 1

    def release(self, pages: Int64s) -> None:
        """Drop one reference of each of `pages`, in any order.

        Raises ValueError, having changed nothing, for a page that is not in use or is named twice.
        """
        pages, counts = self._require_used(pages)
        counts -= 1
        self._counts[pages] = counts
        self.num_free += len(pages) - int(np.count_nonzero(counts))

    def unused(self, pages: Int64s) -> Int64s:
        """Those of `pages` that have no reference."""
        without: Int64s = pages[self._counts[pages] == 0]
        return without

    def _next_pages(self, count: int) -> Int64s | None:
        """The pages behind those taken last, if they are free and no slab need end between them."""
        for start in (self._next, 0):
            window = self._counts[:-1][start : start + count]
            in_a_slab = start % self._span + count <= self._span
            if len(window) == count and (in_a_slab or count > self._span) and not window.any():
                self._next = start + count
                return np.arange(start, start + count)
        return None

    def _longest_runs(self, count: int) -> Int64s:
        free = (self._counts[:-1] == 0).nonzero()[0]
        pages: Int64s = free[longest_runs(free, self._span, count)]
        self._next = int(pages[-1]) + 1
        return pages

    def _require_used(self, pages: Int64s) -> tuple[Int64s, npt.NDArray[np.int32]]:
        """Return `pages` sorted, and their counts."""
        pages = np.sort(pages, axis=None)
        counts = self._counts.take(pages, mode="clip")
        is_repeated = pages[1:] == pages[:-1]
        if len(pages) and (pages[0] < 0 or is_repeated.any() or not counts.all()):
            wrong = (pages < 0) | (counts == 0)
            wrong[1:] |= is_repeated
            raise ValueError(f"pages {pages[wrong].tolist()} are not in use, or are named twice")
        return pages, counts


def longest_runs(free: Int64s, span: int, count: int) -> Int64s:
    """Positions of `count` of the free pages in as few runs as can be, int64 (count,).

    Args:
        free: ascending, int64 (pages,), at least `count`. span: pages of a slab, with which a run ends.
    """
    starts = np.append(0, ((free[1:] - free[:-1] != 1) | (free[1:] % span == 0)).nonzero()[0] + 1)
    lengths = np.diff(starts, append=len(free))
    order = np.argsort(-lengths, kind="stable")
    order = order[: np.searchsorted(np.cumsum(lengths[order]), count) + 1]
    starts, lengths = starts[order], lengths[order]
    before = np.cumsum(lengths) - lengths
    positions: Int64s = np.repeat(starts - before, lengths)[:count] + np.arange(count)
    return positions
