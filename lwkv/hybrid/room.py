"""What of a store is worth storing, and how much there is room for, of all kinds together."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial

import numpy as np

from lwkv.errors import ConfigError
from lwkv.hybrid.host_tier import HybridHostTier, KindShape
from lwkv.hybrid.ranges import Pieces, Store
from lwkv.hybrid.units import UnitKey
from lwkv.kinds import find_boundary
from lwkv.pool.host_pool import HostPool

LEAST_CHUNKS = 2
NUM_COMING = 8


class Room:
    """Cuts stores to what fits, from their start: each group takes its pages by itself, and the first ones
    would leave none for the others. Where an earlier chunk of full attention is missing, a store begins with
    that.

    Args:
        chunk_size: tokens.
        pieces: of one group of each kind, by the number of the kind.
        unit_pages: that a chunk of each kind takes, in all layers, by the number of the kind.
        shapes: of each kind.
    """

    def __init__(
        self,
        pool: HostPool,
        tier: HybridHostTier,
        chunk_size: int,
        pieces: Mapping[int, Pieces],
        unit_pages: Mapping[int, int],
        shapes: Mapping[int, KindShape],
    ) -> None:
        self._pool = pool
        self._tier = tier
        self._pieces = pieces
        self._unit_pages = unit_pages
        self._shapes = shapes
        self._chunk_size = chunk_size
        self.full_kinds = [kind for kind, shape in shapes.items() if shape.reach.chunks is None]
        # Chunks of full attention that were passed on lately: they may be on their way.
        self._coming: deque[set[bytes]] = deque(maxlen=NUM_COMING)

    def require_least(self) -> None:
        """Raise ConfigError where not even two boundaries fit."""
        chunks = {kind: LEAST_CHUNKS * (shape.reach.chunks or 1) for kind, shape in self._shapes.items()}
        needed = sum(chunks[kind] * pages for kind, pages in self._unit_pages.items())
        if needed > self._pool.max_pages:
            raise ConfigError(
                f"max_local_cpu_size holds {self._pool.max_pages} pages of {self._pool.page_stride} bytes, "
                f"but two chunks of all kinds of caches need {needed}: raise max_local_cpu_size to "
                f"{needed * self._pool.page_stride / (1 << 30):.6f} or more"
            )

    def fit(self, stores: Sequence[Store]) -> list[Store]:
        """The stores, each with only so many leading chunks as there is room for."""
        stores = [self._from_first_missing(store) for store in stores]
        full: list[UnitKey] = []
        units: dict[UnitKey, None] = {}
        for store in stores:
            own = [UnitKey(chunk, kind) for kind in self.full_kinds for chunk in self._chunks(store)]
            kept = units_of(store, self._pieces)
            # What comes before is not to go for it.
            self._tier.use([*own, *kept])
            full += own
            units |= dict.fromkeys(kept)
        if self._new_pages([*units]) > self._pool.available:
            stores = self._cut_all(stores, self._tier.those_whole(full))
        self._coming.append({chunk for store in stores for chunk in self._chunks(store)})
        return [*stores]

    def _cut_all(self, stores: Sequence[Store], full: Sequence[UnitKey]) -> list[Store]:
        """Each cut to what there is room for together with `full` and with all that comes before."""
        room = self._pool.available + self._tier.evictable()
        needed, fitting = {*full}, []
        for store in stores:
            candidates = _Candidates(store, self._pieces, self._tier, self._current(store))
            is_too_much = partial(self._is_too_much, candidates=candidates, needed=needed, room=room)
            most = len(store.hashes)
            if is_too_much(most):
                most = bisect_left(range(1, most), True, key=is_too_much)
            cut, units = candidates.cut(most)
            fitting.append(cut)
            needed |= units
        return fitting

    def _is_too_much(self, num_chunks: int, candidates: _Candidates, needed: Set[UnitKey], room: int) -> bool:
        return self._pages_of(needed | candidates.cut(num_chunks)[1]) > room

    def _current(self, store: Store) -> list[UnitKey]:
        """What is kept of windows and states at the largest boundary of a request, and in use for that."""
        chunks, kinds = self._chunks(store), [*self._pieces]
        whole = [self._tier.are_whole([UnitKey(chunk, kind) for chunk in chunks]) for kind in kinds]
        flags = [np.array(there, bool) for there in whole]
        size = self._chunk_size
        described = [self._pieces[kind].kind for kind in kinds]
        boundary = find_boundary(described, size, len(chunks) * size + 1, 0, flags)
        units = [
            UnitKey(chunks[chunk], kind)
            for kind in kinds
            if kind not in self.full_kinds
            for chunk in self._pieces[kind].chunks_needed(boundary)
        ]
        self._tier.use(units)
        return units

    def _chunks(self, store: Store) -> Sequence[bytes]:
        """All chunks of a request that are computed at the end of a store."""
        return store.hashes[: store.end // self._chunk_size]

    def _from_first_missing(self, store: Store) -> Store:
        """The same from the first chunk on that some kind of full attention lacks, if it is before."""
        chunks = store.hashes[: store.start // self._chunk_size]
        for kind in self.full_kinds:
            there = self._tier.are_whole([UnitKey(chunk, kind) for chunk in chunks])
            for number, chunk in enumerate(chunks):
                if not there[number] and not any(chunk in some for some in self._coming):
                    return replace(store, full_from=number * self._chunk_size)
        return store

    def _new_pages(self, units: Sequence[UnitKey]) -> int:
        """Pages of those that are not here."""
        known = self._tier.are_whole(units)
        return self._pages_of([key for key, there in zip(units, known, strict=True) if not there])

    def _pages_of(self, units: Collection[UnitKey]) -> int:
        return sum([self._unit_pages[key.kind] for key in units])


class _Candidates:
    """What is left of a store if it is cut.

    Args:
        current: what a request has of windows and states, at the boundary at which it could go on now.
    """

    def __init__(
        self, store: Store, pieces: Mapping[int, Pieces], tier: HybridHostTier, current: Sequence[UnitKey]
    ) -> None:
        self._store = store
        self._pieces = pieces
        self._tier = tier
        self._current = current
        self._kinds = {key.kind for key in current}
        self._cuts: dict[int, tuple[Store, set[UnitKey]]] = {}

    def cut(self, num_chunks: int) -> tuple[Store, set[UnitKey]]:
        """Its first chunks, and all that it is to keep then. Worked out once.

        No windows or states where some blocks that they need have slid out. What there is of these now is to
        be kept too, unless another boundary takes its place.
        """
        if num_chunks not in self._cuts:
            store = self._first(num_chunks)
            units = {*units_of(store, self._pieces)}
            has_all = self._kinds <= {key.kind for key in units}
            self._cuts[num_chunks] = store, units if has_all else units.union(self._current)
        return self._cuts[num_chunks]

    def _first(self, num_chunks: int) -> Store:
        store = replace(self._store, hashes=self._store.hashes[:num_chunks])
        return replace(store, boundaries=frozenset()) if self._is_lost(store) else store

    def _is_lost(self, store: Store) -> bool:
        lost = [
            UnitKey(store.hashes[chunk], kind)
            for kind, pieces in self._pieces.items()
            for chunk in pieces.those_gone(pieces.chunks_to_store(store), store.tables[pieces.group])
        ]
        return not all(self._tier.are_whole(lost))


def units_of(store: Store, pieces: Mapping[int, Pieces]) -> list[UnitKey]:
    """All that is to be kept of a store, known or not."""
    return [
        UnitKey(store.hashes[chunk], kind)
        for kind, own in pieces.items()
        for chunk in own.chunks_to_store(store)
    ]
