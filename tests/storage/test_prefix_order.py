from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from lwkv.storage.prefix_order import PrefixOrder, parents_of


def add(order: PrefixOrder[int], *prompt: int) -> None:
    for key, parent in zip(prompt, parents_of(prompt), strict=True):
        order.add(key, parent)
    order.use(prompt)


def test_the_last_chunk_of_the_prompt_used_longest_ago_goes_first() -> None:
    order: PrefixOrder[int] = PrefixOrder()
    add(order, 1, 2, 3)
    add(order, 4, 5)
    assert list(order) == [3, 2, 1, 5, 4]
    order.use([1, 2])
    assert list(order) == [3, 5, 4, 2, 1]


def test_who_uses_a_chunk_uses_those_before_it() -> None:
    order: PrefixOrder[int] = PrefixOrder()
    add(order, 1, 2, 3)
    add(order, 4)
    order.use([3])
    assert list(order) == [4, 3, 2, 1]
    add(order, 1, 2, 5)
    order.add(6, 5)
    order.use([6])
    assert list(order) == [4, 3, 6, 5, 2, 1]


def test_chunks_that_lack_one_before_them_go_first_until_it_is_back() -> None:
    order: PrefixOrder[int] = PrefixOrder()
    add(order, 9)
    add(order, 1, 2, 3, 4)
    order.remove(2)
    assert list(order) == [4, 3, 9, 1]
    order.add(5, 4)
    assert list(order) == [4, 3, 5, 9, 1], "it lacks one of those before its parent"
    add(order, 1, 2)
    assert list(order) == [9, 4, 3, 5, 2, 1]
    order.remove(1)
    assert set(islice(order, 4)) == {2, 3, 4, 5}


def test_a_parent_may_be_learnt_later_and_does_not_change() -> None:
    order: PrefixOrder[int] = PrefixOrder()
    for key in (3, 2, 1):
        order.add(key, None)
    assert list(order) == [3, 2, 1]
    assert list(order.before(3)) == []
    add(order, 1, 2, 3)
    order.add(3, 7)
    assert list(order.before(3)) == [2, 1]
    order.remove(1)
    assert list(order) == [3, 2]


def test_what_is_to_go_first_goes_before_all_others() -> None:
    order: PrefixOrder[int] = PrefixOrder()
    add(order, 1, 2)
    add(order, 3, 4)
    order.evict_first(3)
    assert list(order) == [3, 4, 2, 1]
    order.remove(3)
    assert list(order) == [4, 2, 1]


@given(st.lists(st.tuples(st.sampled_from(["add", "use", "remove"]), st.integers(0, 4), st.integers(0, 4))))
def test_wrong_parents_do_no_harm(calls: list[tuple[str, int, int]]) -> None:
    """Keys whose parents go round in a circle cannot come from hashes; nothing may hang because of them."""
    order: PrefixOrder[int] = PrefixOrder()
    here = set()
    for call, key, other in calls:
        if call == "add":
            order.add(key, other)
            here.add(key)
        elif call == "use":
            order.use([key, other])
        else:
            order.remove(key)
            here.discard(key)
        assert sorted(order) == sorted(here)


@given(
    st.lists(
        st.tuples(
            st.booleans(), st.lists(st.tuples(st.integers(0, 6), st.none() | st.integers(0, 6)), max_size=5)
        )
    )
)
def test_many_at_a_time_are_as_one_by_one(calls: list[tuple[bool, list[tuple[int, int | None]]]]) -> None:
    together: PrefixOrder[int] = PrefixOrder()
    apart: PrefixOrder[int] = PrefixOrder()
    for is_added, pairs in calls:
        keys, parents = [key for key, _ in pairs], [parent for _, parent in pairs]
        if is_added:
            together.add_all(keys, parents)
        else:
            together.remove_all(keys)
        for key, parent in pairs:
            if is_added:
                apart.add(key, parent)
            else:
                apart.remove(key)
        assert list(together) == list(apart)
        assert list(together.orphans) == list(apart.orphans)
        for key in range(7):
            assert together.parent(key) == apart.parent(key)
            assert together.has_behind(key) == apart.has_behind(key)


class Counted:
    """A key that counts how often any is looked up."""

    looked_up = 0

    def __hash__(self) -> int:
        Counted.looked_up += 1
        return id(self)


def test_the_work_does_not_grow_with_the_number_of_chunks() -> None:
    order: PrefixOrder[Counted] = PrefixOrder()
    prompts = [[Counted() for _ in range(100)] for _ in range(1000)]
    for prompt in prompts:
        for key, parent in zip(prompt, parents_of(prompt), strict=True):
            order.add(key, parent)
        order.use(prompt)
    assert len(order) == 100_000
    oldest = prompts[0]
    Counted.looked_up = 0
    new = Counted()
    order.add(new, oldest[-1])
    order.use([new])
    victim = next(iter(order))
    order.remove(victim)
    assert victim is prompts[1][-1]
    assert Counted.looked_up < 12 * len(oldest)
    orphaned = prompts[2]
    Counted.looked_up = 0
    order.remove(orphaned[0])
    assert list(islice(order, 99)) == orphaned[:0:-1]
    assert Counted.looked_up < 12 * len(orphaned)
