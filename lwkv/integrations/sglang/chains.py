"""Which page comes before which: SGLang does not say when it hands over pages to store."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

MOST_PAGES = 1 << 16


class Chains:
    """The pages before those that were looked up last, two times `MOST_PAGES` of them at most.

    A prefill in parts is looked up whole and handed over to store part by part.
    """

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}
        self._older: dict[str, str] = {}

    def note(self, hashes: Sequence[str]) -> None:
        """Take in the hashes of pages that follow each other in a prompt."""
        if len(self._parents) > MOST_PAGES:
            self._older, self._parents = self._parents, {}
        self._parents.update(zip(islice(hashes, 1, None), hashes, strict=False))

    def parent(self, page: str) -> str | None:
        """The page before this one; None where it is a prompt's first, or not known."""
        return self._parents.get(page) or self._older.get(page)
