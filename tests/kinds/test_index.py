"""What every rank has of each kind."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lwkv.kinds import Kind, KindIndex, find_boundary

KINDS = [Kind("full", 2, 1, 8), Kind("window", 2, 1, 8, span=6), Kind("state", 4, 1, 8)]
HASHES = [bytes([i]) * 16 for i in range(6)]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["kept", "dropped"]),
        st.integers(0, 1),
        st.integers(0, 2),
        st.lists(st.sampled_from(HASHES), max_size=6),
    ),
    max_size=30,
)


@given(CHANGES, st.integers(0, 26), st.integers(0, 3))
def test_the_answer_is_that_for_the_chunks_that_both_ranks_have(changes, num_tokens, local_chunks) -> None:
    index = KindIndex(KINDS, 4, 2)
    index.introduce(0)
    index.introduce(1)
    has = [[set(), set(), set()] for _ in range(2)]
    for call, rank, kind, hashes in changes:
        getattr(index, call)(rank, kind, hashes)
        change = has[rank][kind].update if call == "kept" else has[rank][kind].difference_update
        change(hashes)
    present = [np.array([h in has[0][kind] & has[1][kind] for h in HASHES]) for kind in range(3)]
    local = 4 * local_chunks
    assert index.boundary(HASHES, num_tokens, local) == find_boundary(KINDS, 4, num_tokens, local, present)
    assert index.full_hit(HASHES, num_tokens, local) == find_boundary(
        KINDS[:1], 4, num_tokens, local, present[:1]
    )


def test_nothing_is_there_before_all_ranks_are_known() -> None:
    index = KindIndex(KINDS, 4, 2)
    index.introduce(0)
    for kind in range(3):
        index.kept(0, kind, HASHES)
    assert index.boundary(HASHES, 25) == 0


def test_a_stage_without_layers_of_a_kind_is_not_asked_for_it() -> None:
    index = KindIndex(KINDS, 4, 2)
    index.introduce(0, [0, 2])
    index.introduce(1, [0, 1])
    for rank, kind in ((0, 0), (1, 0), (0, 2), (1, 1)):
        index.kept(rank, kind, HASHES)
    assert index.boundary(HASHES, 25) == 24


def test_a_rank_that_is_introduced_again_with_the_same_kinds_keeps_its_chunks() -> None:
    index = KindIndex(KINDS[:1], 4, 1)
    index.introduce(0)
    index.kept(0, 0, HASHES)
    index.introduce(0)
    assert index.boundary(HASHES, 25) == 24
    index.clear()
    assert index.boundary(HASHES, 25) == 0
