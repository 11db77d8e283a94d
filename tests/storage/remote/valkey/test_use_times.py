from __future__ import annotations

import pytest

from lwkv.storage.remote.valkey import use_times
from lwkv.storage.remote.valkey.use_times import KEPT_MS, UseTimes

NOW = 1e9


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def uses(clock: Clock) -> UseTimes:
    return UseTimes(clock)


def after(seconds: float, depth: int) -> int:
    return int((NOW + seconds) * 1000) + KEPT_MS - depth


def test_the_last_chunk_of_a_prompt_ends_first(uses: UseTimes) -> None:
    assert uses.follow(["a", "b", "c"]) == [("c", after(0, 2)), ("b", after(0, 1)), ("a", after(0, 0))]


def test_using_a_part_uses_all_that_comes_before_it(uses: UseTimes, clock: Clock) -> None:
    uses.follow(["a", "b"])
    uses.follow(["b", "c"])
    clock.now += 1
    assert uses.follow(["c", "d"]) == [(name, after(1, 3 - i)) for i, name in enumerate("dcba")]


def test_a_chunk_that_is_written_later_still_ends_before_the_one_in_front_of_it(
    uses: UseTimes, clock: Clock
) -> None:
    uses.follow(["a", "b"])
    clock.now += 60
    assert uses.until_ms("b") == after(0, 1)
    assert uses.until_ms("unknown") == after(60, 0)


def test_the_clock_does_not_go_back(uses: UseTimes, clock: Clock) -> None:
    uses.follow(["a"])
    clock.now -= 60
    assert uses.follow(["x"]) == [("x", after(0, 0))]


def test_only_the_chunks_used_last_are_remembered_the_beginning_of_a_prompt_longest(
    uses: UseTimes, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(use_times, "MOST_CHUNKS", 3)
    uses.follow(["a", "b", "c", "d"])
    clock.now += 1
    assert [uses.until_ms(name) for name in "abcd"] == [after(0, 0), after(0, 1), after(0, 2), after(1, 0)]


def test_chunks_that_name_each_other_as_the_one_before_end_somewhere(uses: UseTimes) -> None:
    uses.follow(["a", "b"])
    uses.follow(["b", "a"])
    assert {name for name, _ in uses.follow(["a", "b"])} == {"a", "b"}
