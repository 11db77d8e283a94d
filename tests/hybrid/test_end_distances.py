"""Distances to the ends of prefixes, against their definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lwkv.hybrid.end_distances import EndDistances

CHUNKS = [name.encode() for name in ("a", "ab", "abc", "abcd", "abcde", "abx", "abxy", "q", "qr", "qs")]


def distance(there: set[bytes], chunk: bytes) -> int:
    """Of those that are there, which have the one before them in their name."""
    behind = [other for other in there if other[:-1] == chunk]
    return min((1 + distance(there, other) for other in behind), default=0)


@given(st.lists(st.sampled_from(CHUNKS), max_size=40), st.sets(st.integers(1, 6)))
def test_distances_and_what_passes_a_bound_are_those_of_the_definition(toggled, bounds) -> None:
    """Chunks come and go in any order, also without the one before them."""
    distances, there = EndDistances(bounds), set()
    farthest = max(bounds, default=0)
    for chunk in toggled:
        was = {each: distances.of(each) for each in CHUNKS}
        if chunk in there:
            there.remove(chunk)
            passed = distances.remove(chunk)
        else:
            there.add(chunk)
            passed = distances.add(chunk, chunk[:-1]) if chunk[:-1] else []
        now = {each: distances.of(each) for each in CHUNKS}
        seen = {each: min(farthest, distance(there, each)) for each in CHUNKS}
        assert now == seen
        apart = {each for each in CHUNKS if any((now[each] < b) != (was[each] < b) for b in bounds)}
        assert {*passed} == apart
        assert passed == sorted(passed, key=len, reverse=True), "the nearest first"


def name(number: int) -> bytes:
    return number.to_bytes(4, "big")


@pytest.mark.parametrize("farthest", [1, 16, 100])
def test_a_chunk_of_a_long_prefix_takes_no_more_steps_than_the_farthest_distance(
    farthest, monkeypatch
) -> None:
    steps = 0
    count = EndDistances._count

    def counted(*args) -> int:
        nonlocal steps
        steps += 1
        return count(*args)

    monkeypatch.setattr(EndDistances, "_count", counted)
    distances = EndDistances([farthest])
    for number in range(1, 500):
        steps = 0
        distances.add(name(number), name(number - 1))
        assert steps <= farthest + 1
    for number in reversed(range(1, 500)):
        steps = 0
        distances.remove(name(number))
        assert steps <= farthest + 1
    assert (distances._before, distances._behind) == ({}, {}), "nothing is left behind"
