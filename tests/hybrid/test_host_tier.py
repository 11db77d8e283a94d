"""Eviction over several kinds, against the rule by its words."""

from __future__ import annotations

import numpy as np
import pytest
from hybrid.unit_oracle import SlowUnits
from hypothesis import given, settings
from hypothesis import strategies as st

from lwkv.hybrid.host_tier import HybridHostTier, KindShape, Piece
from lwkv.hybrid.units import Reach, UnitKey
from lwkv.storage.host_tier import Chunk

FULL, WINDOW, STATE = 0, 1, 2
REACHES = {FULL: Reach(None), WINDOW: Reach(2), STATE: Reach(1, is_state=True)}
PROMPTS = ["a", "ab", "abc", "abcd", "abcde", "abx", "abxy", "q", "qr", "qrs"]


class Pages:
    """Pages that count how often they are released."""

    def __init__(self) -> None:
        self.used: set[int] = set()
        self.read: set[int] = set()
        self._next = 0

    def take(self, count: int) -> np.ndarray:
        pages = np.arange(self._next, self._next + count)
        self._next += count
        self.used.update(pages.tolist())
        return pages

    def shared(self, pages: np.ndarray) -> np.ndarray:
        return np.isin(pages, [*self.read])

    def release(self, pages: np.ndarray) -> None:
        for page in pages.tolist():
            self.used.remove(page)


class Tier:
    """A tier of units of one page, each of one piece, of a fixed room."""

    def __init__(self, room: int, state_pages: int = 1000) -> None:
        self.pages, self.room = Pages(), room
        shapes = {kind: KindShape(1, reach) for kind, reach in REACHES.items()}
        self.tier = HybridHostTier(self.pages, shapes, state_pages)

    def put(self, prompt: str, kind: int) -> None:
        piece = Piece(UnitKey(prompt.encode(), kind), 0)
        if self.tier.contains([piece]) == [True]:
            return
        if len(self.pages.used) >= self.room:
            assert self.tier.evict(len(self.pages.used) + 1 - self.room)
        before = prompt[:-1].encode() or None
        self.tier.insert([piece], [Chunk(self.pages.take(1))], [before])

    @property
    def there(self) -> set[UnitKey]:
        return {key for key, _ in self.tier._units.items()}


def needed(prompt: str) -> list[UnitKey]:
    """What a request needs to go on behind a prompt."""
    fulls = [UnitKey(prompt[:end].encode(), FULL) for end in range(1, len(prompt) + 1)]
    windows = [
        UnitKey(prompt[:end].encode(), WINDOW) for end in range(max(1, len(prompt) - 1), len(prompt) + 1)
    ]
    return [*fulls, *windows, UnitKey(prompt.encode(), STATE)]


EVENTS = st.lists(st.tuples(st.sampled_from(["store", "hit"]), st.sampled_from(PROMPTS)), max_size=30)


@settings(max_examples=300)
@given(EVENTS, st.integers(11, 30))
def test_what_stays_is_what_the_rule_leaves(events, room) -> None:
    """Whole prompts are stored: full attention of all chunks, the window and state of the end."""
    tier, oracle = Tier(room), SlowUnits(REACHES, room)
    for event, prompt in events:
        if event == "store":
            known = needed(prompt)[: len(prompt)]
            tier.tier.use(known)
            oracle.use(known)
            for end in range(1, len(prompt) + 1):
                tier.put(prompt[:end], FULL)
                oracle.put(prompt[:end], FULL)
            for key in needed(prompt)[len(prompt) :]:
                tier.put(key.hash.decode(), key.kind)
                oracle.put(key.hash.decode(), key.kind)
        elif tier.there.issuperset(needed(prompt)):
            chunks = tier.tier.pin_hit(needed(prompt), [])
            assert chunks is not None
            tier.tier.unpin(chunks)
            oracle.use(needed(prompt), as_hit=True)
        assert tier.there == set(oracle.used), (event, prompt)
        assert [*tier.tier._units._inside] == oracle.inside
    assert len(tier.pages.used) == len(tier.there)


def store(tier: Tier, prompt: str, boundaries: str = "") -> None:
    for end in range(1, len(prompt) + 1):
        tier.put(prompt[:end], FULL)
        if prompt[end - 1] in boundaries:
            tier.put(prompt[:end], WINDOW)
            tier.put(prompt[:end], STATE)


def test_windows_and_states_inside_a_longer_prefix_go_first() -> None:
    tier = Tier(9)
    store(tier, "abcd", "abcd")  # 12 units
    fulls, end = needed("abcd")[:4], needed("abcd")[4:]
    # Those that came to be inside first have gone first: two states, then a window.
    assert tier.there == {*fulls, *end, UnitKey(b"ab", WINDOW), UnitKey(b"abc", STATE)}
    store(tier, "q")
    store(tier, "qr")
    assert tier.there == {*fulls, *end, UnitKey(b"q", FULL), UnitKey(b"qr", FULL)}


def test_a_state_with_which_a_request_went_on_stays_longer_than_what_is_inside() -> None:
    tier = Tier(10)
    store(tier, "ab", "b")
    chunks = tier.tier.pin_hit([UnitKey(b"a", FULL), UnitKey(b"ab", FULL), UnitKey(b"ab", STATE)], [])
    tier.tier.unpin(chunks or [])
    store(tier, "abcdefgh")
    assert {UnitKey(b"ab", STATE), UnitKey(b"ab", WINDOW)} <= tier.there
    store(tier, "x")
    assert UnitKey(b"ab", STATE) in tier.there
    assert UnitKey(b"ab", WINDOW) not in tier.there


def hit(tier: Tier, prompt: str) -> None:
    chunks = tier.tier.pin_hit(needed(prompt), [])
    assert chunks is not None
    tier.tier.unpin(chunks)


def test_the_windows_and_states_of_a_conversation_s_earlier_turns_go_before_another_prompt() -> None:
    """Each turn goes on where the turn before ended, and ends two chunks behind it."""
    tier = Tier(18)
    store(tier, "qr", "qr")
    store(tier, "ab", "ab")
    for turn in ("abcd", "abcdef", "abcdefgh"):
        hit(tier, turn[:-2])
        store(tier, turn, turn[-2:])
    assert {*needed("qr"), *needed("abcdefgh")} <= tier.there


def test_where_prompts_part_a_window_and_state_that_were_hit_once_stay() -> None:
    tier = Tier(17)
    store(tier, "ab", "ab")
    store(tier, "abxyz")
    hit(tier, "ab")
    store(tier, "abcde", "de")
    assert {*needed("ab"), *needed("abcde")} <= tier.there
    store(tier, "q")
    store(tier, "qr")
    assert {*needed("ab"), *needed("abcde")} <= tier.there


def test_no_window_or_state_outlives_its_full_attention() -> None:
    tier = Tier(4)
    store(tier, "a", "a")
    store(tier, "xyzw")
    assert tier.there == {UnitKey(b"xyzw"[:end], FULL) for end in range(1, 5)}


def test_states_take_no_more_than_their_share() -> None:
    tier = Tier(100, state_pages=3)
    for prompt in "abcdefg":
        store(tier, prompt, prompt)
    states = {key.hash for key in tier.there if key.kind == STATE}
    assert states == {b"e", b"f", b"g"}
    assert sum(key.kind == WINDOW for key in tier.there) == 7


def test_a_hit_with_a_state_keeps_it_where_states_are_many() -> None:
    tier = Tier(100, state_pages=2)
    store(tier, "a", "a")
    store(tier, "b", "b")
    chunks = tier.tier.pin_hit([UnitKey(b"a", FULL), UnitKey(b"a", STATE)], [])
    tier.tier.unpin(chunks or [])
    store(tier, "c", "c")
    assert {key.hash for key in tier.there if key.kind == STATE} == {b"a", b"c"}


def test_what_is_pinned_or_read_stays_and_too_few_pages_free_nothing() -> None:
    tier = Tier(100)
    store(tier, "ab", "b")
    chunks = tier.tier.pin_hit([UnitKey(b"a", FULL), UnitKey(b"ab", FULL)], [])
    assert chunks is not None
    assert tier.tier.evictable() == 2
    assert not tier.tier.evict(3)
    assert len(tier.there) == 4
    tier.pages.read.update(tier.tier._units.get(UnitKey(b"ab", STATE)).pieces[0].pages.tolist())
    assert not tier.tier.evict(2)
    assert tier.tier.evict(1)
    tier.tier.unpin(chunks)
    tier.pages.read.clear()
    assert tier.tier.evict(3)
    assert not tier.pages.used


def test_a_hit_of_which_a_unit_is_missing_pins_nothing() -> None:
    tier = Tier(100)
    store(tier, "ab")
    assert tier.tier.pin_hit([UnitKey(b"ab", FULL), UnitKey(b"ab", STATE)], []) is None
    assert tier.tier.pins == 0


class Heard:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int, list[bytes]]] = []

    def kept(self, kind, hashes) -> None:
        self.calls.append(("kept", kind, [*hashes]))

    def dropped(self, kind, hashes) -> None:
        self.calls.append(("dropped", kind, [*hashes]))


def test_a_chunk_is_visible_when_the_last_piece_of_all_groups_is_there() -> None:
    pages, heard = Pages(), Heard()
    tier = HybridHostTier(pages, {0: KindShape(2, Reach(None))}, 10)
    tier.watcher = heard
    key = UnitKey(b"a", 0)
    tier.insert([Piece(key, 0)], [Chunk(pages.take(2))], [None])
    assert heard.calls == []
    assert tier.pin_hit([key], []) is None
    tier.insert([Piece(key, 1)], [Chunk(pages.take(2))], [None])
    assert heard.calls == [("kept", 0, [b"a"])]
    tier.insert([Piece(key, 1)], [Chunk(pages.take(2))], [None])
    assert len(pages.used) == 4, "what is here stays"
    assert tier.evict(1)
    assert heard.calls[1:] == [("dropped", 0, [b"a"])]
    assert not pages.used


def test_a_part_of_a_chunk_goes_without_a_word() -> None:
    pages, heard = Pages(), Heard()
    tier = HybridHostTier(pages, {0: KindShape(2, Reach(None))}, 10)
    tier.watcher = heard
    tier.insert([Piece(UnitKey(b"a", 0), 0)], [Chunk(pages.take(1))], [None])
    assert tier.evict(1)
    assert heard.calls == []


@pytest.mark.parametrize("kinds", [[WINDOW], [WINDOW, STATE]])
def test_without_full_attention_all_go_by_their_last_use(kinds) -> None:
    pages = Pages()
    tier = HybridHostTier(pages, {kind: KindShape(1, REACHES[kind]) for kind in kinds}, 10)
    for name in (b"a", b"ab", b"abc"):
        tier.insert([Piece(UnitKey(name, WINDOW), 0)], [Chunk(pages.take(1))], [name[:-1] or None])
    tier.unpin(tier.pin_hit([UnitKey(b"a", WINDOW)], []) or [])
    assert tier.evict(1)
    assert {key.hash for key, _ in tier._units.items()} == {b"a", b"abc"}


def test_a_closed_tier_keeps_nothing_and_frees_what_is_pinned_at_its_unpin() -> None:
    tier = Tier(100)
    store(tier, "ab", "b")
    chunks = tier.tier.pin_hit([UnitKey(b"ab", FULL)], [])
    tier.tier.close()
    assert len(tier.pages.used) == 1
    tier.put("q", FULL)
    assert len(tier.pages.used) == 1
    tier.tier.unpin(chunks or [])
    assert not tier.pages.used
