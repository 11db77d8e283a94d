"""Which chunks of each kind are in host memory: one order of eviction for all."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple, Protocol

import numpy as np

from lwkv.hybrid.units import Reach, Unit, UnitKey, Units
from lwkv.platforms.protocol import Int64s
from lwkv.storage.host_tier import Chunk, PageCounts

FIRST_LOOKED_AT = 16
"""Units whose pages are looked at together for eviction, the first time; twice as many each time after."""


class KindWatcher(Protocol):
    """Called for chunks of a kind that become whole and for those that go, in order, under the tier's lock:
    it must not block."""

    def kept(self, kind: int, hashes: Sequence[bytes]) -> None: ...

    def dropped(self, kind: int, hashes: Sequence[bytes]) -> None: ...


class KindShape(NamedTuple):
    """A kind as host memory sees it: `num_pieces` of all groups make a chunk of it whole."""

    num_pieces: int
    reach: Reach


class Piece(NamedTuple):
    """A part of a chunk of one kind: of which chunk, and which one of its pieces."""

    unit: UnitKey
    slot: int


class WholeUnit(NamedTuple):
    """A chunk of a kind of which all pieces are there; the pages of all, one piece after the other, int64.

    `before` is the chunk before it, where it is of full attention and that is known.
    """

    key: UnitKey
    pages: Int64s
    before: bytes | None


class SharedPages(PageCounts, Protocol):
    """What the tier asks of the pages; see HostPool."""

    def share(self, pages: Int64s) -> None: ...


class HybridHostTier:
    """The chunks of all kinds in one pool. Thread-safe.

    A chunk of a kind becomes visible when all of its pieces are here, and goes with all of them. States take
    at most a share of the pages: above that the state that is of least use goes for a new one.

    Args:
        pool: counts references to pages.
        kinds: by number.
        most_state_pages: that states take together.

    Attributes:
        evicted: chunks of a kind, so far.
        watcher: who is called.
    """

    def __init__(self, pool: SharedPages, kinds: Mapping[int, KindShape], most_state_pages: int) -> None:
        self._pool = pool
        self._kinds = kinds
        self._num_pieces = {number: kind.num_pieces for number, kind in kinds.items()}
        self._units = Units({number: kind.reach for number, kind in kinds.items()})
        self._most_state_pages = most_state_pages
        self._state_pages = 0
        self._pages = 0
        self._pinned_pages = 0
        self._lock = threading.Lock()
        self._closed = False
        self.pins = 0
        self.evicted = 0
        self.watcher: KindWatcher | None = None

    def __len__(self) -> int:
        return len(self._units)

    def contains(self, pieces: Sequence[Piece]) -> list[bool]:
        with self._lock:
            return [chunk is not None for chunk in self._those(pieces)]

    def are_whole(self, units: Sequence[UnitKey]) -> list[bool]:
        """Whether all pieces of each are here."""
        with self._lock:
            found = zip(units, self._units.get_all(units), strict=True)
            return [
                unit is not None and len(unit.pieces) == self._num_pieces[key.kind] for key, unit in found
            ]

    def those_whole(self, units: Sequence[UnitKey]) -> list[UnitKey]:
        """Those of which all pieces are here."""
        return [key for key, there in zip(units, self.are_whole(units), strict=True) if there]

    def pin(self, pieces: Sequence[Piece]) -> list[Chunk | None]:
        """Pin every piece that is here; `unpin` ends it. They do not count as used. None after `close`."""
        with self._lock:
            found: list[Chunk | None] = [None] * len(pieces)
            if not self._closed:
                found = self._those(pieces)
            self._pin([chunk for chunk in found if chunk is not None])
            return found

    def pin_whole(self, units: Sequence[UnitKey]) -> list[list[Chunk] | None]:
        """As `pin`, for each of the units the pieces in their order, or None if some is not here."""
        with self._lock:
            found = [None if self._closed else self._whole_pieces(key) for key in units]
            self._pin([piece for pieces in found if pieces is not None for piece in pieces])
            return found

    def pin_hit(self, units: Sequence[UnitKey], used: Sequence[UnitKey]) -> list[Chunk] | None:
        """Pin all pieces of `units` for a request that goes on with them, or nothing if one is not whole.

        Args:
            used: units of full attention before, which count as used and are not pinned.
        """
        with self._lock:
            found = [self._units.get(key) for key in units]
            whole = [unit for unit, key in zip(found, units, strict=True) if self._is_whole(key, unit)]
            if self._closed or len(whole) < len(units):
                return None
            chunks = [chunk for unit in whole if unit is not None for chunk in unit.pieces.values()]
            self._pin(chunks)
            self._units.use(units, as_hit=True)
            self._units.use(used)
            return chunks

    def use(self, units: Sequence[UnitKey]) -> None:
        """Note that those that are here are used, and all of full attention before them."""
        with self._lock:
            self._units.use(units)

    def unpin(self, chunks: Sequence[Chunk]) -> None:
        with self._lock:
            self._unpin(chunks)
            dropped = self._drop_all() if self._closed else []
        self._release(dropped)

    def insert(
        self,
        pieces: Sequence[Piece],
        chunks: Sequence[Chunk],
        before: Sequence[bytes | None],
        shares: bool = False,
    ) -> list[WholeUnit]:
        """Take over pieces with the caller's page references; what is here stays.

        Args:
            before: the chunk before that of each piece, if it is known.
            shares: whether to return what became whole, with references to its pages that are the caller's.
        """
        with self._lock:
            new, dropped = self._add_all(pieces, chunks, before)
            self._units.use([*new])
            whole = [key for key, unit in new.items() if len(unit.pieces) == self._num_pieces[key.kind]]
            self._tell_kept(whole)
            shared = self._share(whole) if shares else []
            dropped += self._bound_states(new)
        self._release(dropped)
        return shared

    def evictable(self) -> int:
        """How many pages are in pieces that are not pinned."""
        return self._pages - self._pinned_pages

    def evict(self, num_pages: int) -> bool:
        """Free `num_pages` pages or more, in the order of `Units`; none where too few can go."""
        with self._lock:
            victims = self._victims(num_pages)
            if victims is None:
                return False
            dropped = self._drop(victims)
        self._release(dropped)
        return True

    def close(self) -> None:
        """Drop everything, what is pinned with its last pin, and keep nothing from now on."""
        with self._lock:
            self._closed = True
            dropped = self._drop_all()
        self._release(dropped)

    def _piece(self, piece: Piece) -> Chunk | None:
        unit = self._units.get(piece.unit)
        return None if unit is None else unit.pieces.get(piece.slot)

    def _those(self, pieces: Sequence[Piece]) -> list[Chunk | None]:
        """As `_piece` of each, without a call for it: a store waits."""
        found = zip(pieces, self._units.get_all([unit for unit, _ in pieces]), strict=True)
        return [None if unit is None else unit.pieces.get(slot) for (_, slot), unit in found]

    def _whole_pieces(self, key: UnitKey) -> list[Chunk] | None:
        unit = self._units.get(key)
        if unit is None or not self._is_whole(key, unit):
            return None
        return [unit.pieces[slot] for slot in sorted(unit.pieces)]

    def _share(self, units: Sequence[UnitKey]) -> list[WholeUnit]:
        """The pages of units that are whole, with a reference more to each."""
        found = []
        for key in units:
            pages = np.concatenate([piece.pages for piece in self._whole_pieces(key) or ()])
            self._pool.share(pages)
            found.append(WholeUnit(key, pages, self._units.before(key)))
        return found

    def _is_whole(self, key: UnitKey, unit: Unit | None) -> bool:
        return unit is not None and len(unit.pieces) == self._num_pieces[key.kind]

    def _pin(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if not chunk.pins:
                self._pinned_pages += len(chunk.pages)
            chunk.pins += 1
        self.pins += len(chunks)

    def _unpin(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            chunk.pins -= 1
            if not chunk.pins:
                self._pinned_pages -= len(chunk.pages)
        self.pins -= len(chunks)

    def _add_all(
        self, pieces: Sequence[Piece], chunks: Sequence[Chunk], before: Sequence[bytes | None]
    ) -> tuple[dict[UnitKey, Unit], list[Chunk]]:
        """Add those that are not here: the units that have some of them, and the chunks left over."""
        new: dict[UnitKey, Unit] = {}
        dropped: list[Chunk] = []
        units = self._units.get_all([unit for unit, _ in pieces])
        for (key, slot), chunk, parent, known in zip(pieces, chunks, before, units, strict=True):
            unit = known or new.get(key)
            if self._closed or (unit is not None and slot in unit.pieces):
                dropped.append(chunk)
                continue
            unit = new[key] = unit or self._units.add(key, parent)
            unit.pieces[slot] = chunk
            self._pages += len(chunk.pages)
            self._state_pages += len(chunk.pages) * self._kinds[key.kind].reach.is_state
        return new, dropped

    def _bound_states(self, new: Mapping[UnitKey, Unit]) -> list[Chunk]:
        """Drop states until they take no more than their share; those just inserted stay."""
        if self._state_pages <= self._most_state_pages:
            return []
        victims, excess = [], self._state_pages - self._most_state_pages
        states = [key for key in self._units.states() if key not in new]
        for key, num_pages in self._pages_of_free(states).items():
            if excess > 0:
                victims.append(key)
                excess -= num_pages
        return self._drop(victims)

    def _pages_of_free(self, keys: Sequence[UnitKey]) -> dict[UnitKey, int]:
        """The pages of those that nobody has pinned, and whose pages nobody reads, in their order."""
        found = zip(keys, self._units.get_all(keys), strict=True)
        units = {key: unit for key, unit in found if unit is not None and unit.pieces and not unit.is_pinned}
        chunks = [[chunk.pages for chunk in unit.pieces.values()] for unit in units.values()]
        counts = [sum(map(len, pages)) for pages in chunks]
        if not counts:
            return {}
        shared = self._pool.shared(np.concatenate([page for pages in chunks for page in pages]))
        if not shared.any():
            return dict(zip(units, counts, strict=True))
        starts = np.cumsum([0, *counts[:-1]], dtype=np.int64)
        read: list[bool] = np.logical_or.reduceat(shared, starts).tolist()
        rows = zip(units, counts, read, strict=True)
        return {key: count for key, count, is_read in rows if not is_read}

    def _victims(self, num_pages: int) -> list[UnitKey] | None:
        """Those to go for so many pages, in their order, with those of other kinds that are beside them."""
        victims: dict[UnitKey, None] = {}
        order, size = iter(self._units), FIRST_LOOKED_AT
        while num_pages > 0 and (some := [*islice(order, size)]):
            size *= 2
            with_others = {key: self._units.beside(key) for key in some}
            free = self._pages_of_free([*dict.fromkeys([*some, *chain.from_iterable(with_others.values())])])
            for key in some:
                if num_pages <= 0:
                    break
                for each in (key, *with_others[key]) if key in free else ():
                    if each in free and each not in victims:
                        victims[each] = None
                        num_pages -= free[each]
        return None if num_pages > 0 else [*victims]

    def _drop_all(self) -> list[Chunk]:
        return self._drop([key for key, unit in self._units.items() if not unit.is_pinned])

    def _drop(self, keys: Sequence[UnitKey]) -> list[Chunk]:
        """Remove units; their pieces."""
        units = [*zip(keys, self._units.remove_all(keys), strict=True)]
        whole = [key for key, unit in units if len(unit.pieces) == self._num_pieces[key.kind]]
        chunks = [(key, chunk) for key, unit in units for chunk in unit.pieces.values()]
        states = [len(chunk.pages) for key, chunk in chunks if self._kinds[key.kind].reach.is_state]
        self._state_pages -= sum(states)
        self._pages -= sum([len(chunk.pages) for _, chunk in chunks])
        self.evicted += len(whole)
        if self.watcher is not None:
            for kind, hashes in _by_kind(whole).items():
                self.watcher.dropped(kind, hashes)
        return [chunk for _, chunk in chunks]

    def _tell_kept(self, keys: Sequence[UnitKey]) -> None:
        if self.watcher is not None:
            for kind, hashes in _by_kind(keys).items():
                self.watcher.kept(kind, hashes)

    def _release(self, chunks: Sequence[Chunk]) -> None:
        if chunks:
            pages: Int64s = np.concatenate([chunk.pages for chunk in chunks])
            self._pool.release(pages)


def _by_kind(keys: Sequence[UnitKey]) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    for key in keys:
        found.setdefault(key.kind, []).append(key.hash)
    return found
