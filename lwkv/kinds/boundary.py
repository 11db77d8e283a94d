"""How far a prompt can go on from what is cached of several kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lwkv.kinds.kind import Kind
from lwkv.platforms.protocol import Int64s

Flags: TypeAlias = "npt.NDArray[np.bool_]"


def find_boundary(
    kinds: Sequence[Kind], chunk_size: int, num_tokens: int, local: int, present: Sequence[Flags]
) -> int:
    """The largest of `find_boundaries`; `local` where there is none."""
    found = find_boundaries(kinds, chunk_size, num_tokens, local, present)
    return int(found[-1]) if len(found) else local


def find_boundaries(
    kinds: Sequence[Kind], chunk_size: int, num_tokens: int, local: int, present: Sequence[Flags]
) -> Int64s:
    """All boundaries behind `local` at which a request can go on, in tokens, int64 (n,), in order.

    A boundary is a multiple of `chunk_size` below `num_tokens`: at least one token must be computed. All
    kinds must have what a request needs there, see `Kind.first_needed`.

    Args:
        local: tokens that the engine has of all kinds itself.
        present: for each kind bool (chunks,), which chunks every rank has of it. Those behind the end of an
            array are not there.
    """
    most = max(num_tokens - 1, 0) // chunk_size
    chunks = np.arange(local // chunk_size + 1, most + 1)
    possible = np.ones(len(chunks), bool)
    for kind, flags in zip(kinds, present, strict=True):
        possible &= _whole(kind, chunk_size, chunks, local, flags)
    found: Int64s = chunks[possible] * chunk_size
    return found


def _whole(kind: Kind, chunk_size: int, chunks: Int64s, local: int, flags: Flags) -> Flags:
    """Whether a kind has what is needed at the end of each so many `chunks`, int64 (n,): bool (n,)."""
    boundaries = chunks * chunk_size
    first = kind.first_needed_all(boundaries, local)
    needed = np.where(first < boundaries, chunks - first // chunk_size, 0)
    whole: Flags = _run_lengths(flags, int(chunks[-1]) if len(chunks) else 0)[chunks] >= needed
    return whole


def _run_lengths(flags: Flags, length: int) -> Int64s:
    """How many chunks are there in a row before the end of each number of chunks, int64 (length + 1,)."""
    present = np.zeros(length + 1, bool)
    present[1 : len(flags) + 1] = flags[:length]
    places = np.arange(length + 1)
    runs: Int64s = places - np.maximum.accumulate(np.where(present, 0, places))
    return runs
