"""Rows as runs of neighbouring positions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lwkv.integrations.vllm.blending.model.runs import closed, pieces

POSITIONS = st.sets(st.integers(0, 60), min_size=1).map(lambda found: np.array(sorted(found), np.int64))


@settings(deadline=None)
@given(POSITIONS, st.integers(1, 9), st.integers(1, 4))
def test_pieces_are_all_rows_in_order_within_both_limits(
    positions: np.ndarray, most_rows: int, most_runs: int
) -> None:
    reached = 0
    for piece in pieces(positions, most_rows, most_runs):
        assert piece.first == reached < piece.last <= reached + most_rows
        assert len(piece.ends) <= most_runs
        assert piece.ends[-1] == piece.last
        bounds = [piece.first, *piece.ends.tolist()]
        for first, last in pairwise(bounds):
            assert first < last
            assert (np.diff(positions[first:last]) == 1).all()
        reached = piece.last
    assert reached == len(positions)


@settings(deadline=None)
@given(POSITIONS, st.integers(1, 80))
def test_runs_are_as_few_as_they_can_be(positions: np.ndarray, most_rows: int) -> None:
    (piece, *_) = pieces(positions, most_rows, 100)
    rows = positions[piece.first : piece.last]
    assert len(piece.ends) == 1 + int((np.diff(rows) != 1).sum())


def test_without_rows_there_is_no_piece() -> None:
    assert list(pieces(np.zeros(0, np.int64), 5, 5)) == []


@settings(deadline=None)
@given(POSITIONS, st.data(), st.integers(0, 4))
def test_closing_adds_only_rows_in_small_gaps(positions: np.ndarray, data: st.DataObject, gap: int) -> None:
    drawn = data.draw(st.sets(st.sampled_from(range(len(positions)))))
    numbers = np.array(sorted(drawn), np.int64)
    found = closed(numbers, positions, gap).tolist()
    chosen = [int(positions[number]) for number in numbers]
    for number in range(len(positions)):
        here = int(positions[number])
        before = max((p for p in chosen if p < here), default=None)
        behind = min((p for p in chosen if p > here), default=None)
        is_between = before is not None and behind is not None and behind - before - 1 <= gap
        assert (number in found) == (here in chosen or is_between)
