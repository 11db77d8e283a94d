from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lwkv.pool.page_refcounts import PageRefcounts

SPAN = 7
SLABS = 3


def with_free(free: Sequence[int]) -> PageRefcounts:
    """Pages of which these are free and all others in use."""
    pages = PageRefcounts(SPAN)
    pages.grow(SLABS * SPAN)
    pages.take(SLABS * SPAN)
    pages.release(np.array(free, np.int64))
    return pages


def runs_in(free: set[int]) -> list[tuple[int, int]]:
    """The longest runs of `free` that stay in a slab, by brute force."""
    runs: list[tuple[int, int]] = []
    for page in sorted(free):
        if runs and runs[-1][1] == page and page % SPAN:
            runs[-1] = (runs[-1][0], page + 1)
        else:
            runs.append((page, page + 1))
    return runs


def runs_of(pages: list[int]) -> int:
    """How many runs the pages lie in, as they come."""
    return sum(
        page % SPAN == 0 or page != before + 1 for before, page in zip([-2, *pages], pages, strict=False)
    )


class PageCountsMachine(RuleBasedStateMachine):
    """Counts beside the set of pages that must be free, and those that have several references."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = with_free([])
        self.free: set[int] = set()
        self.shared: set[int] = set()

    @property
    def taken(self) -> list[int]:
        return sorted(set(range(SLABS * SPAN)) - self.free)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        given = data.draw(st.lists(st.sampled_from(self.taken), unique=True))
        self.pages.release(np.array(given, np.int64))
        self.free |= set(given) - self.shared
        self.shared -= set(given)

    @precondition(lambda self: set(self.taken) - self.shared)
    @rule(data=st.data())
    def share(self, data: Any) -> None:
        page = data.draw(st.sampled_from(sorted(set(self.taken) - self.shared)))
        self.pages.share(np.array([page]))
        self.shared.add(page)

    @rule(data=st.data())
    def take(self, data: Any) -> None:
        count = data.draw(st.integers(0, len(self.free)))
        lengths = sorted((end - start for start, end in runs_in(self.free)), reverse=True)
        found = self.pages.take(count).tolist()
        assert len(found) == len(set(found)) == count
        assert set(found) <= self.free
        fewest = next(number for number in range(len(lengths) + 1) if sum(lengths[:number]) >= count)
        neighbours = found == list(range(found[0], found[0] + count)) if found else True
        assert neighbours or runs_of(found) == fewest
        self.free -= set(found)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def refuse_to_release_or_share_what_is_free(self, data: Any) -> None:
        page = data.draw(st.sampled_from(sorted(self.free)))
        for change in (self.pages.release, self.pages.share):
            with pytest.raises(ValueError, match=rf"pages \[{page}\] are not in use"):
                change(np.array([*self.taken, page]))

    @invariant()
    def counts_are_those_of_the_set(self) -> None:
        assert self.pages.num_free == len(self.free)
        assert self.pages.total == len(self.taken) + len(self.shared)
        assert self.pages.shared(np.array(self.taken, np.int64)).tolist() == [
            page in self.shared for page in self.taken
        ]


TestPageCounts = PageCountsMachine.TestCase
TestPageCounts.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_in_pieces_the_longest_run_is_taken_first() -> None:
    pages = with_free([0, 1, 7, 8, 9, 10, 11, 14, 15, 16])
    assert pages.take(6).tolist() == [7, 8, 9, 10, 11, 14]
    assert sorted(pages.take(4).tolist()) == [0, 1, 15, 16]


def test_pages_behind_the_last_are_taken_next_as_long_as_they_are_free() -> None:
    pages = with_free(range(21))
    assert [pages.take(count).tolist() for count in (3, 4, 7)] == [[0, 1, 2], [3, 4, 5, 6], [*range(7, 14)]]
    pages.release(np.arange(14))
    assert pages.take(6).tolist() == [14, 15, 16, 17, 18, 19]
    assert pages.take(2).tolist() == [0, 1]
    assert pages.take(9).tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_a_run_ends_with_its_slab() -> None:
    pages = with_free([4, 5, 6, 7, 8])
    assert pages.take(3).tolist() == [4, 5, 6]
    assert pages.take(2).tolist() == [7, 8]


def test_pages_that_are_added_are_free() -> None:
    pages = PageRefcounts(SPAN)
    assert (pages.num_free, pages.take(0).tolist()) == (0, [])
    pages.grow(3)
    assert pages.take(1).tolist() == [0]
    pages.grow(6)
    assert pages.take(5).tolist() == [1, 2, 3, 4, 5]
    assert sorted(pages.take(3).tolist()) == [6, 7, 8]


def test_growing_slab_by_slab_copies_all_counts_a_few_times_only() -> None:
    pages, rooms = PageRefcounts(SPAN), []
    for _ in range(1000):
        pages.grow(SPAN)
        pages.take(SPAN - 1)
        if not any(pages._room is room for room in rooms):
            rooms.append(pages._room)
    assert len(rooms) <= 11
    assert (pages.num_free, pages.total) == (1000, 1000 * (SPAN - 1))
    with pytest.raises(ValueError, match="not in use"):
        pages.release(np.array([1000 * SPAN], np.int64))
