"""Rows of a prompt as runs of neighbouring positions: each is a sequence of its own to vLLM's attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lwkv.platforms.protocol import Int64s


class CallRows(NamedTuple):
    """Neighbouring rows [first, last) of a pass, computed in one call; run i ends before row `ends[i]`."""

    first: int
    last: int
    ends: Int64s


def pieces(positions: Int64s, most_rows: int, most_runs: int) -> Iterator[CallRows]:
    """Cut rows at ascending `positions`, int64 (rows,), into calls of so many rows and runs at most.

    A row sees the keys up to its own position, which earlier pieces have written: any cut is exact.
    """
    starts = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    first = 0
    while first < len(positions):
        later = starts[starts > first]
        limit = int(later[most_runs - 1]) if len(later) >= most_runs else len(positions)
        last = min(first + most_rows, limit, len(positions))
        yield CallRows(first, last, np.append(later[later < last], last))
        first = last


def closed(numbers: Int64s, positions: Int64s, most_gap: int) -> Int64s:
    """`numbers` of rows, ascending, with those rows between that make gaps of `most_gap` or fewer runs.

    A run costs a sequence of attention, which is more than a few rows.

    Args:
        positions: int64 (rows,), of all rows, ascending.
    """
    if not len(numbers):
        return numbers
    chosen = np.zeros(len(positions), bool)
    chosen[numbers] = True
    before = np.maximum.accumulate(np.where(chosen, positions, -1))
    behind = np.minimum.accumulate(np.where(chosen, positions, np.iinfo(np.int64).max)[::-1])[::-1]
    is_between = (before >= 0) & (behind - before - 1 <= most_gap)
    return np.flatnonzero(chosen | is_between)
