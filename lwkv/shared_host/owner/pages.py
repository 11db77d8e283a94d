"""The pages of a node's memory, counted by reference."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from lwkv.platforms.protocol import Int64s
from lwkv.pool.page_refcounts import PageRefcounts
from lwkv.pool.page_spills import PageSpills
from lwkv.shared_host.owner.free_pages import FreePages


class NodePages:
    """Which pages are in use, by the index or by clients. For one thread.

    Args:
        num_pages: that there can be.
        span: pages of a slab; pages are handed out as neighbours within one where there are such.
        by_slab: whether there is no page before `add_slab`; else all are there.

    Attributes:
        num_there: pages that there are.
    """

    def __init__(self, num_pages: int, span: int, by_slab: bool = False) -> None:
        self.num_pages = num_pages
        self.num_there = 0 if by_slab else num_pages
        self._span = span
        self._counts = PageRefcounts(span)
        self._counts.grow(num_pages)
        self._free = FreePages(num_pages, span, self.num_there)
        self._spills = PageSpills()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def has_spills(self) -> bool:
        """Whether anything is beside any page."""
        return len(self._spills) > 0

    def add_slab(self, slab: int) -> None:
        """Let there be the pages of a slab, all free."""
        first, end = self.of_slab(slab)
        self._free.give(np.arange(first, end))
        self.num_there += end - first

    def remove_slab(self, slab: int) -> None:
        """Let there be the pages of a slab, all of which are free, no more."""
        first, end = self.of_slab(slab)
        self._free.withdraw(first, end)
        self.num_there -= end - first

    def of_slab(self, slab: int) -> tuple[int, int]:
        """The first page of a slab, and the one behind its last."""
        return slab * self._span, min((slab + 1) * self._span, self.num_pages)

    def num_used_in(self, slab: int) -> int:
        """How many pages of a slab have references."""
        return self._counts.num_used(*self.of_slab(slab))

    @property
    def references(self) -> int:
        """Sum of all reference counts."""
        return self._counts.total

    def take(self, count: int, end: int, near: tuple[int, int] | None = None) -> Int64s | None:
        """Take `count` pages below page `end`, one reference each; None where so many are not free there.

        Args:
            near: pages [first, end) of which as many are taken as can be.
        """
        pages = self._free.take(count, end, near)
        if pages is not None:
            self._counts.add(pages)
        return pages

    def free_below(self, end: int) -> int:
        """How many pages below page `end` are free."""
        return self._free.below(end)

    def shared(self, pages: Int64s) -> npt.NDArray[np.bool_]:
        """Which of `pages`, of any shape, have several references."""
        return self._counts.shared(pages)

    def add(self, pages: Int64s) -> None:
        """Add one reference to each of `pages`, which are in use, each named once."""
        self._counts.add(pages)

    def share(self, pages: Int64s) -> None:
        """Add one reference to each of `pages`. Raises ValueError as `release`."""
        self._counts.share(pages)

    def release(self, pages: Int64s) -> None:
        """Drop one reference of each of `pages`; free those at zero, with what is beside them.

        Raises ValueError, having changed nothing, for a page that is not in use or is named twice.
        """
        self._counts.release(pages)
        unused = self._counts.unused(pages)
        self._free.give(unused)
        spill = self._spills.take(unused)
        if len(spill):
            self.release(spill)

    def add_spills(self, spill_of: Mapping[int, Int64s]) -> None:
        """Let pages be beside others, with a reference to each of them. Raises ValueError as `release`."""
        for page, spill in spill_of.items():
            self._counts.share(spill)
            self._spills.add(np.array([page]), spill[None])

    def spills_of(self, pages: Int64s) -> dict[int, Int64s]:
        """By page, what is beside those of `pages`, int64 (pages,), that have some."""
        return {int(pages[i]): spill for i, spill in self._spills.of(pages).items()}
