"""Pins of lookups: bounded, ended by time, never lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from storage.rig import Clock, Rig

from lwkv.integrations.sglang.page_keys import page_keys
from lwkv.integrations.sglang.promises import PROMISE_S, Promises
from lwkv.keys import ChunkKey


def page(number: int) -> str:
    return (number.to_bytes(16, "little") + bytes(16)).hex()


def pages(*numbers: int) -> list[str]:
    return [page(number) for number in numbers]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    rig.store(1, 2, 3, 5)
    yield rig
    assert rig.host.pins == 0
    rig.end()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def promises(rig: Rig, clock: Clock) -> Iterator[Promises]:
    promises = Promises(rig.host, 4, clock)
    yield promises
    promises.clear()


def test_keys_are_half_of_the_hash() -> None:
    assert page_keys("model", pages(1, 2)) == [ChunkKey("model", n.to_bytes(16, "little")) for n in (1, 2)]
    assert page_keys("model", []) == []


def test_the_longest_prefix_is_pinned(rig: Rig, promises: Promises) -> None:
    assert len(promises.promise("a", "model", pages(1, 2, 3, 4, 5)).keys) == 3
    assert rig.host.pins == 3


def test_what_is_not_there_is_not_pinned(rig: Rig, promises: Promises) -> None:
    assert promises.promise("a", "model", pages(4, 5)).keys == []
    assert promises.promise("a", "other", pages(1, 2)).keys == []
    assert rig.host.pins == 0


def test_another_question_of_a_request_ends_the_promise_before(rig: Rig, promises: Promises) -> None:
    promises.promise("a", "model", pages(1, 2, 3))
    assert len(promises.promise("a", "model", pages(5)).keys) == 1
    assert rig.host.pins == 1


def test_a_promise_ends_by_time_unless_it_is_asked_for_again(
    rig: Rig, clock: Clock, promises: Promises
) -> None:
    promises.promise("a", "model", pages(1, 2, 3))
    promises.promise("b", "model", pages(5))
    clock.now += PROMISE_S / 2
    promises.promise("a", "model", pages(1, 2, 3))
    clock.now += PROMISE_S / 2
    promises.expire()
    assert promises.take("b", pages(5)) is None
    assert rig.host.pins == 3


def test_the_oldest_promises_end_where_they_pin_too_much(rig: Rig, promises: Promises) -> None:
    for rid in "abc":
        promises.promise(rid, "model", pages(1, 2, 3))
    # The last one, and one other: four pins at most for all others.
    assert rig.host.pins == 6
    assert promises.take("a", pages(1, 2, 3)) is None


def test_pins_go_with_a_promise_that_is_taken(rig: Rig, promises: Promises) -> None:
    promises.promise("a", "model", pages(1, 2, 3))
    promise = promises.take("a", pages(1, 2))
    assert promise is not None
    # The third page was promised, and is not to be loaded.
    assert (len(promises), rig.host.pins) == (0, 2)
    promises.unpin(promise)


def test_more_than_was_promised_is_not_given(rig: Rig, promises: Promises) -> None:
    promises.promise("a", "model", pages(1, 2))
    assert promises.take("a", pages(1, 2, 3)) is None
    assert rig.host.pins == 0


def test_other_pages_than_were_promised_are_not_given(rig: Rig, promises: Promises) -> None:
    promises.promise("a", "model", pages(1, 2, 3))
    assert promises.take("a", pages(1, 5)) is None
    assert rig.host.pins == 0
