"""Which windows and states are inside longer prefixes, against the definition by recursion."""

from __future__ import annotations

from collections import Counter, OrderedDict

from hybrid.unit_oracle import passed_by
from hypothesis import given, settings
from hypothesis import strategies as st

from lwkv.hybrid.units import Reach, UnitKey, Units

FULL = 0
NAMES = [name.encode() for name in ("a", "ab", "abc", "abcd", "abcde", "abx", "abxy", "q", "qr", "qs")]


class RecursiveInside:
    """Looks at all chunks behind each one, and after each event at all before."""

    def __init__(self, reaches: dict[int, Reach]) -> None:
        self.reaches = reaches
        self.there: set[UnitKey] = set()
        self.hit: Counter[UnitKey] = Counter()
        self.passed: set[UnitKey] = set()
        self.inside: OrderedDict[UnitKey, None] = OrderedDict()

    def add(self, key: UnitKey) -> None:
        self.there.add(key)
        self._revise(key.hash)
        beside = [other for other in self.there if other.hash == key.hash and other.kind != FULL]
        self.passed |= passed_by(beside if key.kind == FULL else [key], self.there, self.reaches)
        self._revise(key.hash)

    def remove(self, key: UnitKey) -> None:
        self.there.remove(key)
        del self.hit[key]
        self.passed.discard(key)
        self.inside.pop(key, None)
        self._revise(key.hash)

    def use_as_hit(self, key: UnitKey) -> None:
        if key in self.there:
            self.hit[key] += 1
            self.passed.discard(key)
            self.inside.pop(key, None)

    def _revise(self, chunk: bytes) -> None:
        for end in range(len(chunk), 0, -1):
            for kind, reach in self.reaches.items():
                key = UnitKey(chunk[:end], kind)
                if reach.chunks is None or key not in self.there:
                    continue
                is_wanted = self.hit[key] > 1 or (self.hit[key] == 1 and key not in self.passed)
                if is_wanted or self._is_near_end(key.hash, reach.chunks):
                    self.inside.pop(key, None)
                else:
                    self.inside.setdefault(key, None)

    def _is_near_end(self, chunk: bytes, reach: int) -> bool:
        behind = [key.hash for key in self.there if key.kind == FULL and key.hash[:-1] == chunk]
        return not behind or (reach > 1 and any(self._is_near_end(key, reach - 1) for key in behind))


REACHES = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(
    lambda chunks: {FULL: Reach(None)} | {1 + i: Reach(count) for i, count in enumerate(chunks)}
)
EVENTS = st.lists(
    st.tuples(st.sampled_from(["toggle", "toggle", "hit"]), st.sampled_from(NAMES), st.integers(0, 3)),
    max_size=50,
)


@settings(max_examples=300)
@given(REACHES, EVENTS)
def test_what_is_inside_and_in_which_order_is_as_by_recursion(reaches, events) -> None:
    """Chunks come, go and are hit in any order, also without those before them."""
    units, slow = Units(reaches), RecursiveInside(reaches)
    for event, name, number in events:
        key = UnitKey(name, number % len(reaches))
        if event == "hit":
            units.use([key], as_hit=True)
            slow.use_as_hit(key)
        elif key in slow.there:
            units.remove_all([key])
            slow.remove(key)
        else:
            units.add(key, name[:-1] or None)
            slow.add(key)
        assert [*units._inside] == [*slow.inside]


def test_a_long_prefix_with_a_wide_window_is_kept_and_evicted() -> None:
    units = Units({FULL: Reach(None), 1: Reach(1024)})
    names = [number.to_bytes(4, "big") for number in range(2000)]
    for before, name in zip([None, *names], names, strict=False):
        units.add(UnitKey(name, FULL), before)
        units.add(UnitKey(name, 1), before)
    assert [*units._inside] == [UnitKey(name, 1) for name in names[: 2000 - 1024]]
    for name in reversed(names[1900:]):
        units.remove_all([UnitKey(name, 1)])
        units.remove_all([UnitKey(name, FULL)])
    assert [*units._inside] == [UnitKey(name, 1) for name in names[: 1900 - 1024]]
