"""Which pages one client holds: it reads or writes them, so they are nobody else's to write."""

from __future__ import annotations

import numpy as np

from lwkv.platforms.protocol import Int64s
from lwkv.shared_host.owner.pages import NodePages
from lwkv.shared_host.protocol import ProtocolError


class Holds:
    """One client's holds; each is a reference to the page. A client that is gone loses all at once."""

    def __init__(self, pages: NodePages) -> None:
        self._pages = pages
        self._held = np.zeros(pages.num_pages, np.int32)

    @property
    def num_pages(self) -> int:
        return int(np.count_nonzero(self._held))

    def take_over(self, pages: Int64s) -> None:
        """Count references that were taken for this client, each page once."""
        self._held[pages] += 1

    def add(self, pages: Int64s) -> None:
        """Hold `pages` of chunks, each named once, once more."""
        self._pages.add(pages)
        self._held[pages] += 1

    def require(self, pages: Int64s) -> None:
        """Raise ProtocolError unless all of `pages` are held."""
        if not self._has(pages, 1):
            raise ProtocolError(f"got {len(pages)} pages of which the client does not hold all")

    def end(self, pages: Int64s, counts: Int64s) -> None:
        """End `counts` holds of `pages`, each named once. Raises ProtocolError for more than there are."""
        if len(counts) != len(pages) or (counts < 1).any() or not self._has(pages, counts):
            raise ProtocolError(f"got {len(pages)} pages to free of which the client does not hold all")
        for number in range(int(counts.max(initial=0))):
            self._release(pages[counts > number])

    def end_all(self) -> None:
        """End every hold: nobody of the client reads or writes any more."""
        while len(pages := np.flatnonzero(self._held)):
            self._release(pages)

    def _release(self, pages: Int64s) -> None:
        self._held[pages] -= 1
        self._pages.release(pages)

    def _has(self, pages: Int64s, counts: Int64s | int) -> bool:
        if not len(pages):
            return True
        inside = pages.min() >= 0 and pages.max() < len(self._held) and len(np.unique(pages)) == len(pages)
        return bool(inside) and bool((self._held[pages] >= counts).all())
