"""The answer of a lookup over several kinds, against trying everything."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds.kind_strategies import can_go_on, largest_boundary, models, presence

from lwkv.kinds import Kind, find_boundary


@settings(max_examples=500)
@given(st.data(), models(), st.integers(0, 100))
def test_the_answer_is_the_largest_boundary_at_which_every_kind_can_go_on(data, model, num_tokens) -> None:
    some, chunk_size = model
    present = data.draw(presence(len(some), num_tokens // chunk_size))
    local = data.draw(st.integers(0, num_tokens))
    answer = find_boundary(some, chunk_size, num_tokens, local, present)
    assert answer == largest_boundary(some, chunk_size, num_tokens, local, present)
    assert answer == local or (answer % chunk_size == 0 and local < answer < num_tokens)


@given(st.data(), models(), st.integers(2, 100))
def test_a_chunk_more_never_makes_the_answer_smaller(data, model, num_tokens) -> None:
    some, chunk_size = model
    present = data.draw(presence(len(some), num_tokens // chunk_size))
    before = find_boundary(some, chunk_size, num_tokens, 0, present)
    kind = data.draw(st.integers(0, len(some) - 1))
    if len(present[kind]):
        present[kind][data.draw(st.integers(0, len(present[kind]) - 1))] = True
    assert find_boundary(some, chunk_size, num_tokens, 0, present) >= before


def test_the_last_token_is_always_computed() -> None:
    full = [Kind("full", 4, 1, 8)]
    assert find_boundary(full, 8, 16, 0, [np.ones(2, bool)]) == 8
    assert find_boundary(full, 8, 17, 0, [np.ones(2, bool)]) == 16
    assert find_boundary(full, 8, 0, 0, [np.ones(0, bool)]) == 0


def test_a_window_that_is_gone_at_the_end_leaves_the_boundary_before_it() -> None:
    some = [Kind("full", 4, 1, 8), Kind("window", 4, 1, 8, span=5)]
    there, windows = np.ones(4, bool), np.array([True, True, False, False])
    assert find_boundary(some, 8, 40, 0, [there, windows]) == 16
    assert not can_go_on(some[1], 8, 24, 0, windows)


def test_chunks_behind_the_end_of_an_array_are_not_there() -> None:
    full = [Kind("full", 4, 1, 8)]
    assert find_boundary(full, 8, 100, 0, [np.ones(3, bool)]) == 24
    assert find_boundary(full, 8, 12, 0, [np.ones(30, bool)]) == 8


def test_a_prompt_of_128k_tokens_takes_no_loop_over_its_chunks() -> None:
    """Each kind is asked once for all boundaries, however many there are."""
    asked = []

    class Counted(Kind):
        def first_needed_all(self, boundaries, local=0):
            asked.append(len(boundaries))
            return super().first_needed_all(boundaries, local)

    some = [Counted("full", 16, 1, 8), Counted("window", 16, 1, 8, span=1024), Counted("state", 256, 1, 8)]
    present = [np.ones(512, bool)] * 3
    assert find_boundary(some, 256, 131_072, 0, present) == 131_072 - 256
    assert asked == [511] * 3
