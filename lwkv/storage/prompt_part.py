"""Chunks of a prompt on their way to lower tiers, which learn once that these belong together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

from lwkv.keys import ChunkKey

PromptRows: TypeAlias = "Callable[[Sequence[ChunkKey]], Sequence[Sequence[ChunkKey]]]"
"""From chunks that belong together to rows in which each is of no use without the one before it."""


def one_row(keys: Sequence[ChunkKey]) -> Sequence[Sequence[ChunkKey]]:
    """Chunks of a prompt, each of which needs all before it."""
    return (keys,)


class PromptPart:
    """Chunks in a row, of which `tiers` are to get some. Thread-safe.

    A tier learns of all of them before it gets the first: several are put at a time, in any order, and none
    is to take the place of one before it.

    Args:
        rows: in which a tier learns of them.
    """

    def __init__(
        self, keys: Sequence[ChunkKey], tiers: Sequence[Hashable], rows: PromptRows = one_row
    ) -> None:
        self.keys = list(keys)
        self._rows = rows
        self._locks = {tier: threading.Lock() for tier in tiers}
        self._known_to: set[Hashable] = set()

    def let_know(self, tier: Hashable, follow: Callable[[Sequence[ChunkKey]], None]) -> None:
        """Call `follow` with all rows, the first time for this tier; concurrent callers wait for that."""
        with self._locks[tier]:
            if tier not in self._known_to:
                for row in self._rows(self.keys):
                    follow(row)
                self._known_to.add(tier)


def prompt_parts(
    keys: Sequence[ChunkKey], parents: Sequence[ChunkKey | None], tiers: Sequence[Hashable]
) -> list[PromptPart]:
    """For each chunk the part that it is in; `parents` has the chunk before each."""
    parts: list[PromptPart] = []
    for position, (key, parent) in enumerate(zip(keys, parents, strict=True)):
        if position and parent == keys[position - 1]:
            parts.append(parts[-1])
        else:
            parts.append(PromptPart([] if parent is None else [parent], tiers))
        parts[-1].keys.append(key)
    return parts
