"""Chunks on their way from the device into the host tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    memory where the pool had room for that.
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
    _given_up: bool = False

    def commit(self, whole: npt.NDArray[np.bool_] | None = None) -> None:
        """Make the chunks visible; every page must hold its bytes by now, host-side.

        Not those that are False in `whole`, bool (chunks,): their pages go back.
        """
        chosen = range(len(self.keys)) if whole is None else np.flatnonzero(whole).tolist()
        try:
            if whole is not None and len(chosen) < len(whole):
                self._drop(np.flatnonzero(~whole))
            pages = np.ascontiguousarray(self.pages.T)
            self.put(
                [self.keys[i] for i in chosen],
                [Chunk(pages[i]) for i in chosen],
                [self.parents[i] for i in chosen],
                [self.parts[i] for i in chosen],
            )
        finally:
            self.let_go()

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
        self.lose()

    def lose(self) -> None:
        """As `abort`, but nobody gets the pages: a device that failed may still write to them."""
        self.let_go()
        if not self._given_up:
            self.give_up()
