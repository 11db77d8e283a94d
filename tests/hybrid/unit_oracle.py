"""The rule of eviction by its words: everything is looked at anew each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import takewhile

from lwkv.hybrid.units import Reach, UnitKey


def passed_by(keys: Iterable[UnitKey], there: Set[UnitKey], reaches: Mapping[int, Reach]) -> set[UnitKey]:
    """The units in whose place new ones of their kind are: those of the nearest place before each."""
    found: set[UnitKey] = set()
    fulls = {key.hash for key in there if reaches[key.kind].chunks is None}
    for key in keys:
        reach = max(1, reaches[key.kind].chunks or 0)
        lone = [key.hash[:end] for end in range(len(key.hash) - 1, 0, -1)]
        # A chunk of full attention is behind another if that is known, and alone there.
        lone = [*takewhile(lambda chunk: sum(other[:-1] == chunk for other in fulls) < 2, lone)]
        lone = lone if key.hash in fulls else []
        for number, chunk in enumerate(lone):
            if chunk not in fulls:
                lone = lone[: number + 1]
                break
        flags = [UnitKey(chunk, key.kind) in there for chunk in lone[reach - 1 :]]
        first = flags.index(True) if True in flags else len(flags)
        run = takewhile(bool, flags[first : first + reach])
        found.update(UnitKey(lone[reach - 1 + first + n], key.kind) for n, _ in enumerate(run))
    return found


@dataclass
class SlowUnits:
    """Units, each of one page. Prompts are texts; a chunk is a prefix of one, a letter a chunk.

    Attributes:
        used: when each unit was used last, as a tuple that sorts.
        hit: how often a request went on with each. passed: those that have a later one of their kind in their
            place, since they were hit last. inside: windows and states inside longer prefixes, in the
            order in which they came to be there.
    """

    reaches: dict[int, Reach]
    room: int
    used: dict[UnitKey, tuple[int, ...]] = field(default_factory=dict)
    hit: Counter[UnitKey] = field(default_factory=Counter)
    passed: set[UnitKey] = field(default_factory=set)
    inside: list[UnitKey] = field(default_factory=list)
    events: int = 0

    def put(self, prompt: str, kind: int) -> None:
        """Store a chunk of one kind, the last of `prompt`."""
        key = UnitKey(prompt.encode(), kind)
        if key in self.used:
            return
        while len(self.used) >= self.room:
            self._evict()
        self.used[key] = ()
        self.use([key])
        self._note_inside(prompt)
        places = [other for other in self.used if other.hash == key.hash and not self._is_full(other)]
        self.passed |= passed_by(places if self._is_full(key) else [key], {*self.used}, self.reaches)
        self._note_inside(prompt)

    def use(self, keys: Sequence[UnitKey], as_hit: bool = False) -> None:
        self.events += 1
        here = [key for key in keys if key in self.used]
        for place, key in enumerate(here):
            if not self._is_full(key):
                self.used[key] = (self.events, 0, place)
            for end in range(1, len(key.hash) + 1):
                for kind in self.reaches:
                    before = UnitKey(key.hash[:end], kind)
                    if before in self.used and self._is_full(before):
                        self.used[before] = (self.events, 1, -end)
        if as_hit:
            self.hit.update({*here})
            self.passed -= {*here}
            self.inside = [key for key in self.inside if key not in here]

    def _is_full(self, key: UnitKey) -> bool:
        return self.reaches[key.kind].chunks is None

    def _has_full(self, chunk: bytes) -> bool:
        return UnitKey(chunk, 0) in self.used

    def is_orphan(self, key: UnitKey) -> bool:
        first = len(key.hash) if self._is_full(key) else len(key.hash) + 1
        return not all(self._has_full(key.hash[:end]) for end in range(1, first))

    def _is_inside(self, key: UnitKey) -> bool:
        reach = self.reaches[key.kind].chunks
        if reach is None or self.hit[key] > 1 or (self.hit[key] == 1 and key not in self.passed):
            return False
        behind = {other.hash for other in self.used if self._is_full(other)}
        behind = {chunk for chunk in behind if chunk.startswith(key.hash)} | {key.hash}
        ends = [chunk for chunk in behind if not any(b[:-1] == chunk for b in behind if b != key.hash)]
        return not any(len(end) - len(key.hash) < reach for end in ends)

    def _note_inside(self, prompt: str) -> None:
        self.inside = [key for key in self.inside if key in self.used and self._is_inside(key)]
        for end in range(len(prompt), 0, -1):
            for kind in self.reaches:
                key = UnitKey(prompt[:end].encode(), kind)
                if key in self.used and self._is_inside(key) and key not in self.inside:
                    self.inside.append(key)

    def _evict(self) -> None:
        victim = self.next_to_go()
        del self.used[victim]
        self._forget(victim)
        if self._is_full(victim):
            for key in [key for key in self.used if key.hash == victim.hash]:
                del self.used[key]
                self._forget(key)
        # Without a short branch what is before it may be inside the longer ones.
        self._note_inside(victim.hash[:-1].decode() if self._is_full(victim) else "")

    def _forget(self, key: UnitKey) -> None:
        del self.hit[key]
        self.passed.discard(key)

    def next_to_go(self) -> UnitKey:
        orphans = [key for key in self.used if self.is_orphan(key)]
        assert not orphans, "none is left behind"
        return self.inside[0] if self.inside else min(self.used, key=lambda key: self.used[key])
