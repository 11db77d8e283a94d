from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lwkv.shared_host.owner.slabs import SlabOwners


class User:
    """Has slabs, and keeps those that the test says."""

    def __init__(self) -> None:
        self.kept: set[int] = set()
        self.gave: list[int] = []

    def give_up(self, slab: int) -> bool:
        if slab in self.kept:
            return False
        self.gave.append(slab)
        return True


def test_pages_of_all_sizes_are_counted_as_they_fit_into_slabs() -> None:
    slabs = SlabOwners(3 * 100 + 50, 100)
    assert len(slabs) == 4
    assert slabs.pages_of(10) == (35, 10)
    assert slabs.pages_of(30) == (3 * 3 + 1, 3)
    assert slabs.pages_of(60) == (3, 1)
    assert SlabOwners(50, 100).pages_of(10) == (5, 10)


def test_a_slab_that_nobody_has_goes_first_and_only_where_it_can_be_used() -> None:
    slabs, one, other = SlabOwners(300, 100), User(), User()
    assert [slabs.take(one, 2), slabs.take(other, 2), slabs.take(one, 2)] == [0, 1, None]
    assert slabs.take(one, 3) == 2
    slabs.leave(one)
    assert slabs.take(other, 3) == 0


def test_the_slab_that_was_used_longest_ago_goes_whoever_has_it() -> None:
    slabs, one, other = SlabOwners(400, 100), User(), User()
    for user in (one, other, one, one):
        slabs.take(user, 4)
    slabs.use([0])
    # Its own is newer than 2, and older than 0, of the other.
    assert slabs.take_oldest(other, only_older=True) is None
    slabs.use([1])
    assert slabs.take_oldest(other, only_older=True) == 2
    one.kept = {3}
    slabs.use([1, 2])
    assert slabs.take_oldest(other, only_older=True) == 0
    assert slabs.take_oldest(other, only_older=False) is None
    one.kept.clear()
    assert slabs.take_oldest(other, only_older=True) == 3
    assert one.gave == [2, 0, 3]
    assert other.gave == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 5)), max_size=40))
def test_no_slab_has_two_users_and_none_is_lost(steps: list[tuple[int, int, int]]) -> None:
    slabs, users = SlabOwners(530, 100), [User(), User(), User()]
    owned: list[set[int]] = [set(), set(), set()]
    for number, what, slab in steps:
        user = users[number]
        if what == 0:
            taken = slabs.take(user, slab)
            free = set(range(slab)) - set().union(*owned)
            assert taken == min(free, default=None)
            owned[number] |= set() if taken is None else {taken}
        elif what == 1:
            slabs.use([slab])
        elif what == 2:
            taken = slabs.take_oldest(user, only_older=bool(slab % 2))
            if taken is not None:
                (before,) = [have for have in owned if taken in have]
                assert before is not owned[number]
                before.discard(taken)
                owned[number].add(taken)
            elif not slab % 2:
                assert set().union(*owned) == owned[number]
        else:
            slabs.leave(user)
            owned[number] = set()
