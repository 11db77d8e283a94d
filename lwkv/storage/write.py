"""Chunks on their way from the device into the host tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from lwkv.keys import ChunkKey
from lwkv.platforms.protocol import Int64s
from lwkv.storage.host_tier import Chunk
from lwkv.storage.prompt_part import PromptPart


@dataclass(slots=True, eq=False)
class Write:
    """Pages taken for chunks that are not visible yet; ends with exactly one of `commit`, `abort` and `lose`.

    Nobody else writes the same chunks before that, or before `give_up`. The chunks before them that were here
    stay until the end: `let_go` unpins these.

    `positions`, int64 (chunks,), says which of the keys asked for are written; `parents` has the chunk before
    each, `parts` what each is a part of. `pages` is int64 (layers, chunks), each layer's pages neighbours in
    memory where the pool had room for that. `spare`, of any shape, are pages that no chunk needs after all,
    and that a device may still be writing to.
    """

    positions: Int64s
    keys: Sequence[ChunkKey]
    parents: Sequence[ChunkKey | None]
    parts: Sequence[PromptPart]
    pages: Int64s
    put: Callable[
        [Sequence[ChunkKey], Sequence[Chunk], Sequence[ChunkKey | None], Sequence[PromptPart]], None
    ]
    unclaim: Callable[[Sequence[ChunkKey]], None]
    release: Callable[[Int64s], None]
    let_go: Callable[[], None]
    spare: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    _given_up: bool = False
    _chunks: list[Chunk] | None = None

    def prepare(self) -> None:
        """Do what `commit` can do before the bytes are there: somebody waits for it."""
        self._chunks = [Chunk(pages) for pages in np.ascontiguousarray(self.pages.T)]

    def commit(self, whole: npt.NDArray[np.bool_] | None = None) -> None:
        """Make the chunks visible; every page must hold its bytes by now, host-side.

        Not those that are False in `whole`, bool (chunks,): their pages go back.
        """
        if self._chunks is None:
            self.prepare()
        rows: tuple[Sequence[Any], ...] = (self.keys, self._chunks or (), self.parents, self.parts)
        try:
            if whole is not None and not whole.all():
                self._drop(np.flatnonzero(~whole))
                rows = tuple(list(compress(row, whole)) for row in rows)
            self.put(*rows)
        finally:
            self.let_go()
            self._release_spare()

    def _drop(self, positions: Int64s) -> None:
        self.release(self.pages[:, positions].ravel())
        self.unclaim([self.keys[i] for i in positions.tolist()])

    def give_up(self) -> None:
        """Let others write the same chunks from here on; `abort` is still to come. Takes no lock."""
        self._given_up = True
        self.unclaim(self.keys)

    def abort(self) -> None:
        """Give the pages back; no device may be writing to them any more."""
        self.release(self.pages.ravel())
        self._release_spare()
        self.lose()

    def lose(self) -> None:
        """As `abort`, but nobody gets the pages: a device that failed may still write to them."""
        self.let_go()
        if not self._given_up:
            self.give_up()

    def _release_spare(self) -> None:
        if self.spare.size:
            self.release(self.spare.ravel())


@dataclass(slots=True, eq=False)
class UnnamedWrite:
    """Pages taken for chunks whose keys are not made yet; ends with `abort`, `lose`, or as the Write that
    `StorageManager.begin_write` makes of it.

    `pages` is int64 (layers, chunks), as Write's.
    """

    pages: Int64s
    release: Callable[[Int64s], None]

    def give_up(self) -> None:
        """As Write's; nothing is claimed yet."""

    def abort(self) -> None:
        """As Write's."""
        self.release(self.pages.ravel())

    def lose(self) -> None:
        """As Write's."""
