"""Models of several kinds of tiny odd sizes, and chunks of them that are there."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

import numpy as np
from hypothesis import strategies as st

from lwkv.kinds import Kind

BLOCKS = (1, 2, 3, 4, 6)


@st.composite
def kinds(draw: st.DrawFn) -> Kind:
    form = draw(st.sampled_from(["full", "window", "local", "state"]))
    span = draw(st.integers(1, 40)) if form in ("window", "local") else 0
    return Kind(form, draw(st.sampled_from(BLOCKS)), draw(st.integers(1, 3)), 8, ("bfloat16",), span)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Kind], int]:
    """Kinds and a chunk size that fits all of them."""
    some = draw(st.lists(kinds(), min_size=1, max_size=4))
    unit = lcm(*(kind.block_size for kind in some))
    return some, unit * draw(st.integers(1, 4))


@st.composite
def presence(draw: st.DrawFn, num_kinds: int, num_chunks: int) -> list[np.ndarray]:
    """Mostly there: else no test would find anything."""
    flag = st.integers(0, 4).map(bool)
    row = st.lists(flag, min_size=num_chunks, max_size=num_chunks).map(lambda some: np.array(some, bool))
    return [draw(row) for _ in range(num_kinds)]


def tokens_looked_at(kind: Kind, boundary: int, local: int) -> set[int]:
    """What the layers of a kind look at for the token at `boundary`, and the engine has not itself."""
    first = {
        "full": 0,
        "window": boundary - kind.span + 1,
        "local": boundary - boundary % max(kind.span, 1),
    }[kind.form]
    return set(range(max(first, local), boundary))


def tokens_there(kind: Kind, chunk_size: int, flags: Sequence[bool]) -> set[int]:
    """All tokens of the chunks that are there, as far as they are stored."""
    found: set[int] = set()
    for i in np.flatnonzero(flags).tolist():
        end = (i + 1) * chunk_size
        found.update(range(kind.first_stored(end - chunk_size, end), end))
    return found


def can_go_on(kind: Kind, chunk_size: int, boundary: int, local: int, flags: Sequence[bool]) -> bool:
    """Token by token, by definition."""
    if kind.form == "state":
        number = boundary // chunk_size
        return number <= len(flags) and bool(flags[number - 1])
    return tokens_looked_at(kind, boundary, local) <= tokens_there(kind, chunk_size, flags)


def largest_boundary(
    some: Sequence[Kind], chunk_size: int, num_tokens: int, local: int, present: Sequence[Sequence[bool]]
) -> int:
    """The answer by trying everything."""
    boundaries = range(chunk_size, num_tokens, chunk_size)
    return max(
        (
            boundary
            for boundary in boundaries
            if boundary > local
            and all(
                can_go_on(kind, chunk_size, boundary, local, flags)
                for kind, flags in zip(some, present, strict=True)
            )
        ),
        default=local,
    )
