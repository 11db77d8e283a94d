"""What several kinds keep of chunks, in eviction order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lwkv.hybrid.end_distances import EndDistances
from lwkv.storage.host_tier import Chunk
from lwkv.storage.prefix_order import PrefixOrder


class UnitKey(NamedTuple):
    """A chunk of one kind: what is whole or not, and evicted together."""

    hash: bytes
    kind: int


@dataclass(slots=True, eq=False)
class Unit:
    """The pieces that are there of it, by their slot; whether a request went on at a boundary with it."""

    pieces: dict[int, Chunk] = field(default_factory=dict)
    was_hit: bool = False

    @property
    def is_pinned(self) -> bool:
        return any(chunk.pins for chunk in self.pieces.values())

    @property
    def num_pages(self) -> int:
        return sum(len(chunk.pages) for chunk in self.pieces.values())


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
    prefixes that no request went on with, those first that came to be inside first. Then all by their last
    use, a prompt from its end, windows and states before full attention.

    Without a kind of full attention nothing is before anything: all go by their last use.
    """

    def __init__(self, reaches: Mapping[int, Reach]) -> None:
        self._reaches = reaches
        self._main = next((kind for kind, reach in reaches.items() if reach.chunks is None), None)
        self._units: dict[UnitKey, Unit] = {}
        self._order: PrefixOrder[UnitKey] = PrefixOrder()
        bounds = {max(1, reach.chunks) for reach in reaches.values() if reach.chunks is not None}
        self._distances = EndDistances(bounds)  # of chunks of full attention
        self._inside: OrderedDict[UnitKey, None] = OrderedDict()
        self._states: OrderedDict[UnitKey, None] = OrderedDict()  # used longest ago first

    def __len__(self) -> int:
        return len(self._units)

    def __iter__(self) -> Iterator[UnitKey]:
        """The next to go first. Nothing may be added, used or removed meanwhile."""
        yield from self._order.orphans()
        yield from (key for key in self._inside if not self._order.is_orphan(key))
        yield from (
            key for key in self._order.by_use() if not self._order.is_orphan(key) and key not in self._inside
        )

    def get(self, key: UnitKey) -> Unit | None:
        return self._units.get(key)

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
            self._order.add(key, None)
        elif key.kind == self._main:
            self._order.add(key, None if before is None else UnitKey(before, self._main))
            if before is not None:
                self._revise(self._distances.add(key.hash, before))
        else:
            self._order.add(key, UnitKey(key.hash, self._main))
            self._put_inside(key)
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
                self._units[key].was_hit = True
                self._inside.pop(key, None)
        self._order.use(self._with_before(here))

    def beside(self, key: UnitKey) -> list[UnitKey]:
        """The units of other kinds that are of no use without one of full attention."""
        if key.kind != self._main:
            return []
        kinds = (kind for kind in self._reaches if kind != self._main)
        return [other for kind in kinds if (other := UnitKey(key.hash, kind)) in self._units]

    def remove(self, key: UnitKey) -> Unit:
        """Forget a unit that is here."""
        self._order.remove(key)
        self._inside.pop(key, None)
        self._states.pop(key, None)
        if key.kind == self._main:
            self._revise(self._distances.remove(key.hash))
        return self._units.pop(key)

    def _with_before(self, keys: Sequence[UnitKey]) -> list[UnitKey]:
        """These, with those before them: first to last those of full attention, then the others from the end.

        What is named last goes first: of a window the part that is the first to be of no use.
        """
        found: dict[UnitKey, None] = {}
        for key in keys:
            path, before = [key], self._order.parent(key)
            while before is not None and before in self._units and before not in found:
                path.append(before)
                before = self._order.parent(before)
            found.update(dict.fromkeys(reversed(path)))
        others = [key for key in found if key.kind != self._main]
        return [*(key for key in found if key.kind == self._main), *reversed(others)]

    def _revise(self, chunks: Iterable[bytes]) -> None:
        """Work out again which windows and states of chunks are inside."""
        for chunk in chunks:
            for kind in self._reaches:
                if (key := UnitKey(chunk, kind)) in self._units:
                    self._put_inside(key)

    def _put_inside(self, key: UnitKey) -> None:
        if self._units[key].was_hit or self._is_near_end(key):
            self._inside.pop(key, None)
        else:
            self._inside.setdefault(key, None)

    def _is_near_end(self, key: UnitKey) -> bool:
        """Whether a prefix ends less than its reach behind a unit; of full attention always."""
        reach = self._reaches[key.kind].chunks
        return reach is None or self._distances.of(key.hash) < max(1, reach)
