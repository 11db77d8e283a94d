from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lwkv.free_list import SPARE_ENTRIES, FreeList

SPAN = 7
SLABS = 3


def pages_of(runs: list[tuple[int, int]]) -> list[int]:
    return [page for run in runs for page in range(*run)]


def runs_in(free: set[int]) -> list[tuple[int, int]]:
    """The longest runs of `free` that stay in a slab, by brute force."""
    runs: list[tuple[int, int]] = []
    for page in sorted(free):
        if runs and runs[-1][1] == page and page % SPAN:
            runs[-1] = (runs[-1][0], page + 1)
        else:
            runs.append((page, page + 1))
    return runs


class FreeListMachine(RuleBasedStateMachine):
    """A free list beside the set of pages that it must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = FreeList(SPAN)
        self.free: set[int] = set()
        self.taken: list[tuple[int, int]] = [(slab * SPAN, slab * SPAN + SPAN) for slab in range(SLABS)]

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_part_of_a_run(self, data: Any) -> None:
        start, end = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        first = data.draw(st.integers(start, end - 1))
        last = data.draw(st.integers(first + 1, end))
        self.taken += [run for run in ((start, first), (last, end)) if run[0] < run[1]]
        self.pages.give(first, last)
        self.free |= set(range(first, last))

    @rule(data=st.data())
    def take(self, data: Any) -> None:
        count = data.draw(st.integers(0, len(self.free)))
        longest = max((end - start for start, end in runs_in(self.free)), default=0)
        runs = self.pages.take(count)
        found = pages_of(runs)
        assert len(found) == len(set(found)) == count
        assert set(found) <= self.free
        assert all(start // SPAN == (end - 1) // SPAN for start, end in runs)
        assert len(runs) <= 1 or count > longest, "there was a run that held all"
        self.free -= set(found)
        self.taken += runs

    @rule(more=st.integers(1, 3))
    def refuse_to_take_more_than_there_is(self, more: int) -> None:
        with pytest.raises(ValueError, match=f"asked for {len(self.free) + more} free pages"):
            self.pages.take(len(self.free) + more)

    @invariant()
    def counts_and_runs_are_those_of_the_set(self) -> None:
        assert self.pages.num_free == len(self.free)
        assert sorted(self.pages._end_of.items()) == runs_in(self.free)
        assert self.pages._start_of == {end: start for start, end in runs_in(self.free)}


TestFreeList = FreeListMachine.TestCase
TestFreeList.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_the_longest_run_is_taken_first() -> None:
    pages = FreeList(SPAN)
    for run in ((0, 2), (7, 12), (14, 17)):
        pages.give(*run)
    assert pages.take(6) == [(7, 12), (14, 15)]
    assert pages.take(4) in ([(15, 17), (0, 2)], [(0, 2), (15, 17)])


def test_runs_of_two_slabs_are_never_joined() -> None:
    pages = FreeList(SPAN)
    pages.give(5, 7)
    pages.give(7, 9)
    assert sorted(pages.take(4)) == [(5, 7), (7, 9)]


def test_a_free_list_in_steady_use_does_not_grow() -> None:
    pages = FreeList(100)
    pages.give(0, 100)
    for _ in range(1000):
        [(start, end)] = pages.take(3)
        pages.give(start, end)
    assert len(pages._heap) <= SPARE_ENTRIES + 2
    assert pages.take(100) == [(0, 100)]
