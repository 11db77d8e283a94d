"""What several kinds keep of chunks, in eviction order."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, filterfalse, islice
from operator import attrgetter
from typing import NamedTuple

from lwkv.hybrid.end_distances import EndDistances
from lwkv.storage.host_tier import Chunk
from lwkv.storage.prefix_order import PrefixOrder

PINS = attrgetter("pins")


class UnitKey(NamedTuple):
    """A chunk of one kind: what is whole or not, and evicted together."""

    hash: bytes
    kind: int


@dataclass(slots=True, eq=False)
class Unit:
    """The pieces that are there of it, by their slot.

    Attributes:
        hits: how often a request went on at a boundary with it.
        is_passed: a later unit of its kind came after the last hit, and only one prefix goes on up to that.
    """

    pieces: dict[int, Chunk] = field(default_factory=dict)
    hits: int = 0
    is_passed: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether more requests may go on with it: not if its only one has kept a later place since."""
        return self.hits > 1 or self.is_hit_once

    @property
    def is_hit_once(self) -> bool:
        """Whether one request alone went on with it, and has not kept a later place since."""
        return self.hits == 1 and not self.is_passed

    @property
    def is_pinned(self) -> bool:
        return any(map(PINS, self.pieces.values()))

    @property
    def num_pages(self) -> int:
        return sum([len(chunk.pages) for chunk in self.pieces.values()])


class Reach(NamedTuple):
    """What eviction must know of a kind.

    `chunks` are those before a boundary that a request needs to go on there; None for full attention, which
    needs all.
    """

    chunks: int | None
    is_state: bool = False


class Units:
    """Units in the order in which they are to go. Not thread-safe.

    First those without all chunks of full attention before them. Then windows and states inside longer
    prefixes that no request went on with, or only one that has kept a later place since, as a conversation
    does turn by turn; those first that came to be inside first. Then all by their last use, a prompt from its
    end, windows and states before full attention.

    Without a kind of full attention nothing is before anything: all go by their last use.
    """

    def __init__(self, reaches: Mapping[int, Reach]) -> None:
        self._reaches = reaches
        self._main = next((kind for kind, reach in reaches.items() if reach.chunks is None), None)
        self._others = [kind for kind in reaches if kind != self._main]
        self._units: dict[UnitKey, Unit] = {}
        self._order: PrefixOrder[UnitKey] = PrefixOrder()
        bounds = {max(1, reach.chunks) for reach in reaches.values() if reach.chunks is not None}
        self._distances = EndDistances(bounds)  # of chunks of full attention
        self._inside: OrderedDict[UnitKey, None] = OrderedDict()
        self._states: OrderedDict[UnitKey, None] = OrderedDict()  # used longest ago first
        # By kind, how many units were hit once and are not passed: where there are none, none is looked for.
        self._hit_once: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._units)

    def __iter__(self) -> Iterator[UnitKey]:
        """The next to go first. Nothing may be added, used or removed meanwhile."""
        lacks_one, is_inside = self._order.orphans.__contains__, self._inside.__contains__
        inside = filterfalse(lacks_one, self._inside)
        by_use = filterfalse(is_inside, filterfalse(lacks_one, self._order.parents))
        return chain(self._order.orphans, inside, by_use)  # in C: a store waits for it

    def get(self, key: UnitKey) -> Unit | None:
        return self._units.get(key)

    def get_all(self, keys: Iterable[UnitKey]) -> list[Unit | None]:
        """As `get` of each, without a call for it: a store waits."""
        return [*map(self._units.get, keys)]

    def items(self) -> Iterable[tuple[UnitKey, Unit]]:
        return self._units.items()

    def states(self) -> Iterator[UnitKey]:
        """States, the next to go first."""
        yield from (key for key in self._inside if self._reaches[key.kind].is_state)
        yield from (key for key in self._states if key not in self._inside)

    def add(self, key: UnitKey, before: bytes | None) -> Unit:
        """Have a new unit go last; `before` is the chunk before it."""
        unit = self._units[key] = Unit()
        if self._main is None:
            self._order.add_all([key], [None])
        elif key.kind == self._main:
            self._order.add_all([key], [None if before is None else UnitKey(before, self._main)])
            if before is not None:
                self._add_behind(key, before)
        else:
            self._order.add_all([key], [UnitKey(key.hash, self._main)])
            self._put_inside(key)
            self._pass_before(key.hash, [key.kind])
        if self._reaches[key.kind].is_state:
            self._states[key] = None
        return unit

    def use(self, keys: Sequence[UnitKey], as_hit: bool = False) -> None:
        """Note that units of one prompt are used, and all of full attention before them.

        `as_hit`: a request goes on at a boundary with them.
        """
        here = [key for key in keys if key in self._units]
        for key in here:
            if key in self._states:
                self._states.move_to_end(key)
            if as_hit:
                self._hit(key)
        self._order.use(self._with_before(here))

    def before(self, key: UnitKey) -> bytes | None:
        """The chunk before one of full attention, as far as it is known; None for other kinds."""
        parent = self._order.parent(key) if key.kind == self._main else None
        return None if parent is None else parent.hash

    def beside(self, key: UnitKey) -> list[UnitKey]:
        """The units of other kinds that are of no use without one of full attention."""
        if key.kind != self._main:
            return []
        return [other for kind in self._others if (other := UnitKey(key.hash, kind)) in self._units]

    def remove_all(self, keys: Sequence[UnitKey]) -> list[Unit]:
        """Forget units that are here."""
        self._order.remove_all(keys)
        removed = []
        for key in keys:
            unit = self._units.pop(key)
            removed.append(unit)
            self._hit_once[key.kind] -= unit.is_hit_once
            self._inside.pop(key, None)
            self._states.pop(key, None)
            if key.kind == self._main and (passed := self._distances.remove(key.hash)):
                self._revise(passed)
        return removed

    def _add_behind(self, key: UnitKey, before: bytes) -> None:
        """Note that a unit of full attention is behind a chunk."""
        if passed := self._distances.add(key.hash, before):
            self._revise(passed)
        if any(self._hit_once.values()):
            self._pass_before(key.hash, [other.kind for other in self.beside(key)])

    def _hit(self, key: UnitKey) -> None:
        unit = self._units[key]
        self._hit_once[key.kind] -= unit.is_hit_once
        unit.hits, unit.is_passed = unit.hits + 1, False
        self._hit_once[key.kind] += unit.is_hit_once
        self._inside.pop(key, None)

    def _pass_before(self, chunk: bytes, kinds: Iterable[int]) -> None:
        """Note that there are units of these kinds at a chunk, in the place of the nearest before them."""
        for kind in kinds:
            if self._hit_once[kind]:
                for key in list(self._nearest_before(UnitKey(chunk, kind))):
                    unit = self._units[key]
                    self._hit_once[kind] -= unit.is_hit_once
                    unit.is_passed = True
                    self._put_inside(key)

    def _nearest_before(self, key: UnitKey) -> Iterator[UnitKey]:
        """The units of a place before this one's, the last first, if only one prefix goes on from there."""
        reach = max(1, self._reaches[key.kind].chunks or 0)
        found = 0
        for chunk in islice(self._distances.alone_before(key.hash), reach - 1, None):
            before = UnitKey(chunk, key.kind)
            if before in self._units:
                found += 1
                yield before
            if found and (before not in self._units or found == reach):
                return

    def _with_before(self, keys: Sequence[UnitKey]) -> list[UnitKey]:
        """These, with those before them: first to last those of full attention, then the others from the end.

        What is named last goes first: of a window the part that is the first to be of no use.
        """
        found: dict[UnitKey, None] = {}
        parents, units = self._order.parents, self._units
        for key in keys:
            path, before = [key], parents.get(key)
            while before is not None and before in units and before not in found:
                path.append(before)
                before = parents.get(before)
            found.update(dict.fromkeys(reversed(path)))
        others = [key for key in found if key.kind != self._main]
        return [*(key for key in found if key.kind == self._main), *reversed(others)]

    def _revise(self, chunks: Iterable[bytes]) -> None:
        """Work out again which windows and states of chunks are inside."""
        for chunk in chunks:
            for kind in self._others:
                if (key := UnitKey(chunk, kind)) in self._units:
                    self._put_inside(key)

    def _put_inside(self, key: UnitKey) -> None:
        if self._units[key].is_wanted or self._is_near_end(key):
            self._inside.pop(key, None)
        else:
            self._inside.setdefault(key, None)

    def _is_near_end(self, key: UnitKey) -> bool:
        """Whether a prefix ends less than its reach behind a unit; of full attention always."""
        reach = self._reaches[key.kind].chunks
        return reach is None or self._distances.of(key.hash) < max(1, reach)
