from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lwkv.shared_host.owner.free_pages import FreePages

NUM_PAGES, SPAN = 13, 5


def test_pages_that_were_never_in_use_come_first_and_in_order() -> None:
    free = FreePages(NUM_PAGES, SPAN, NUM_PAGES)
    first = free.take(4, NUM_PAGES)
    assert first is not None
    free.give(first)
    again = free.take(4, NUM_PAGES)
    assert again is not None
    assert (first.tolist(), again.tolist(), len(free)) == ([0, 1, 2, 3], [4, 5, 6, 7], 9)


def test_the_longest_run_is_taken_of_those_that_came_back() -> None:
    free = FreePages(NUM_PAGES, NUM_PAGES, NUM_PAGES)
    assert free.take(NUM_PAGES, NUM_PAGES) is not None
    for pages in ([7], [1, 2], [10, 9, 11]):
        free.give(np.array(pages))
    taken = free.take(3, NUM_PAGES)
    assert taken is not None
    assert taken.tolist() == [9, 10, 11]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.integers(1, NUM_PAGES),
            st.integers(0, NUM_PAGES + 2),
            st.sampled_from([None, (0, 5), (5, 10), (10, 15)]),
        ),
        max_size=40,
    )
)
def test_a_page_is_taken_once_and_all_that_are_free_can_be_those_first_that_are_near(
    steps: list[tuple[bool, int, int, tuple[int, int] | None]],
) -> None:
    free, model, used = FreePages(NUM_PAGES, SPAN, NUM_PAGES), set(range(NUM_PAGES)), list[list[int]]()
    for gives, count, end, near in steps:
        if gives and used:
            pages = used.pop(count % len(used))
            free.give(np.array(pages))
            model |= set(pages)
        else:
            usable = {page for page in model if page < end}
            assert free.below(end) == len(usable)
            taken = free.take(count, end, near)
            assert (taken is not None) == (count <= len(usable))
            if taken is not None:
                if near is not None:
                    inside = usable & set(range(*near))
                    assert len(set(taken.tolist()) & inside) == min(count, len(inside))
                assert len(taken) == count == len(set(taken.tolist()) & usable)
                model -= set(taken.tolist())
                used.append(taken.tolist())
        assert len(free) == len(model)
