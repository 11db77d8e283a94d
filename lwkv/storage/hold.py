"""A request's claim on the cached chunks it is about to load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lwkv.keys import ChunkKey
from lwkv.platforms.protocol import Int64s
from lwkv.storage.guard import Guard
from lwkv.storage.host_tier import Chunk
from lwkv.storage.tier import Missing
from lwkv.storage.tier_answers import FILLED


class LayerPages(NamedTuple):
    """One layer of the chunks held: the page of each, int64 (chunks,), or below 0 why not (Missing)."""

    pages: Int64s


class Found(NamedTuple):
    """Where a chunk was found: pinned in the host tier, or in a lower tier. `parent` is the one before it."""

    key: ChunkKey
    chunk: Chunk | None = None
    tier: Guard | None = None
    parent: ChunkKey | None = None


@dataclass(eq=False)
class Hold:
    """The chunks found, pinned, and the pages that arrive for those from lower tiers.

    `fetched` is int64 (layers, chunks): pages that arrived for lower-tier chunks so far, below 0 where none
    did. They belong to the hold until `release`, which hands complete chunks to `promote` and the other pages
    to `give_back`. `lower` has each lower tier that was found to have some of the chunks, with their keys and
    their positions.
    """

    found: Sequence[Found]
    num_layers: int
    unpin: Callable[[Sequence[Chunk]], None]
    promote: Callable[[Sequence[Found], Sequence[Chunk]], None]
    give_back: Callable[[Int64s], None]
    fetched: Int64s = field(init=False)
    in_host: npt.NDArray[np.bool_] = field(init=False)
    lower: list[tuple[Guard, list[ChunkKey], Int64s]] = field(init=False)
    _host_pages: Int64s = field(init=False)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _released: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.in_host = np.array([item.chunk is not None for item in self.found], bool)
        self.fetched = np.full((self.num_layers, len(self.found)), Missing.LATE, np.int64)
        self._host_pages = self.fetched.copy()
        pages = [item.chunk.pages for item in self.found if item.chunk is not None]
        if pages:
            # As np.stack would, which takes twice as long.
            self._host_pages[:, self.in_host] = np.concatenate(pages).reshape(len(pages), -1).T
        tiers = {item.tier: None for item in self.found if item.tier is not None}
        self.lower = [self._chunks_in(tier) for tier in tiers]

    def all_pages(self) -> Int64s | None:
        """Every layer's pages, int64 (layers, chunks), if all chunks are in the host tier."""
        return self._host_pages if self.in_host.all() else None

    def host_pages(self, layer: int) -> Int64s:
        """The pages of `layer` in the host tier, a copy; LATE for chunks of lower tiers."""
        pages: Int64s = self._host_pages[layer].copy()
        return pages

    def arrived(
        self, layers: int | Int64s, positions: int | Int64s, pages: Int64s, ok: npt.NDArray[np.bool_]
    ) -> None:
        """Take over `pages` as fetched where `ok`; the others, and all after `release`, go back at once.

        Either of one layer or of one chunk, whose number or position is an int.
        """
        with self._lock:
            if self._released:
                ok = np.zeros_like(ok)
            self.fetched[_those(layers, ok), _those(positions, ok)] = pages[ok]
        if not ok.all():
            self.give_back(pages[~ok])

    def release(self) -> None:
        """Unpin and give back everything, once; pages may not be in use by a device any more."""
        with self._lock:
            if self._released:
                return
            self._released = True
        complete = (self.fetched >= 0).all(axis=0)
        positions = np.flatnonzero(complete & ~self.in_host).tolist()
        with ExitStack() as ending:
            # Last: what is promoted is of no use without those before it.
            ending.callback(self.unpin, [item.chunk for item in self.found if item.chunk is not None])
            rest = self.fetched[:, ~complete]
            if (rest >= 0).any():
                ending.callback(self.give_back, rest[rest >= 0])
            self.promote(
                [self.found[i] for i in positions], [Chunk(self.fetched[:, i].copy()) for i in positions]
            )

    def _chunks_in(self, tier: Guard) -> tuple[Guard, list[ChunkKey], Int64s]:
        positions = [i for i, item in enumerate(self.found) if item.tier is tier]
        return tier, [self.found[i].key for i in positions], np.array(positions, np.int64)


def _those(numbers: int | Int64s, ok: npt.NDArray[np.bool_]) -> int | Int64s:
    return numbers if isinstance(numbers, int) else numbers[ok]


def take_over(
    hold: Hold,
    layers: Int64s,
    position: int,
    pages: Int64s,
    over: Callable[[], object],
    call: Future[Int64s],
) -> None:
    """Have a hold take over what a call has brought of some layers of the chunk at `position`."""
    failed = call.cancelled() or call.exception() is not None
    ok = np.zeros(len(pages), bool) if failed else call.result() == FILLED
    hold.arrived(layers, position, pages, ok)
    over()


class LayerFetch:
    """Collects what several tiers bring for one layer of a hold and completes one future with it."""

    def __init__(self, hold: Hold, layer: int, num_parts: int) -> None:
        self.future: Future[LayerPages] = Future()
        self._hold = hold
        self._layer = layer
        self._pages = hold.host_pages(layer)
        self._missing_parts = num_parts
        self._lock = threading.Lock()
        if num_parts == 0:
            self.future.set_result(LayerPages(self._pages))

    def watch(self, part: Future[Int64s], positions: Int64s, pages: Int64s) -> None:
        """Take `pages` for the chunks at `positions` once `part` says which of them are FILLED."""
        part.add_done_callback(partial(self._finish, positions, pages))

    def lacks_memory(self, positions: Int64s) -> None:
        """Count one part as done: there are no pages for the chunks at `positions`."""
        with self._lock:
            self._pages[positions] = Missing.NO_MEMORY
        self._count_part()

    def _finish(self, positions: Int64s, pages: Int64s, part: Future[Int64s]) -> None:
        failed = part.cancelled() or part.exception() is not None
        outcomes = np.full(len(pages), Missing.ERROR) if failed else part.result()
        filled = outcomes == FILLED
        with self._lock:
            self._pages[positions] = np.where(filled, pages, outcomes)
        self._hold.arrived(self._layer, positions, pages, filled)
        self._count_part()

    def _count_part(self) -> None:
        with self._lock:
            self._missing_parts -= 1
            done = self._missing_parts == 0
        if done:
            self.future.set_result(LayerPages(self._pages))
