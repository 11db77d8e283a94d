"""Which pages have other pages beside them, for what is too large for one."""

from __future__ import annotations

import numpy as np

from lwkv.platforms import Int64s


class PageSpills:
    """The spill pages of pages that have some, which are few. Not thread-safe: the pool holds its lock.

    Spill pages have one reference each, which goes with the last one of the page they belong to.
    """

    def __init__(self) -> None:
        self._spill_of: dict[int, Int64s] = {}

    def __len__(self) -> int:
        """How many pages have some."""
        return len(self._spill_of)

    def add(self, pages: Int64s, spill: Int64s) -> None:
        """Let each of `pages`, int64 (pages,), have a row of `spill`, int64 (pages, n)."""
        self._spill_of |= dict(zip(pages.tolist(), spill, strict=True))

    def of(self, pages: Int64s) -> dict[int, Int64s]:
        """By position in `pages`, int64 (pages,), the spill pages of those that have some, int64 (n,)."""
        if not self._spill_of:
            return {}
        return {i: self._spill_of[page] for i, page in enumerate(pages.tolist()) if page in self._spill_of}

    def take(self, pages: Int64s) -> Int64s:
        """Forget the spill pages of `pages`, any shape, and return them, int64 (n,)."""
        if not self._spill_of:
            return np.zeros(0, np.int64)
        taken = [self._spill_of.pop(page) for page in pages.ravel().tolist() if page in self._spill_of]
        return np.concatenate([np.zeros(0, np.int64), *taken])
