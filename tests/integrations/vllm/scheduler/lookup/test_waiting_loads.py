from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
from storage.rig import Clock, keys

from lwkv.integrations.vllm.reports import RankInfo, RankReport
from lwkv.integrations.vllm.scheduler.lookup.patience import Patience, Wait
from lwkv.integrations.vllm.scheduler.lookup.waiting_load import WaitingLoad
from lwkv.integrations.vllm.scheduler.lookup.waiting_loads import WaitingLoads, Wanted
from lwkv.storage.prefetch import CHUNKS_AT_A_TIME
from lwkv.telemetry.counters import Counters

TIMEOUT_S = 10.0


class Waiting(WaitingLoads):
    """With two ranks and a clock that stands still."""

    def __init__(self) -> None:
        self.clock, self.counters = Clock(), Counters()
        super().__init__(2, TIMEOUT_S, self.counters, self.clock)

    def add(self, name: str, num_chunks: int, most: int = 8) -> bool:
        chunks = keys(*range(num_chunks))
        self.begin(name, [chunks, chunks], 0, num_chunks, most)
        return self.waits(name, most)

    def end(self, *numbers: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        for rank in ranks:
            self.learn(RankReport(RankInfo(rank, "model"), 1, fetched=numbers))


def test_a_request_waits_until_every_rank_has_fetched() -> None:
    waiting = Waiting()
    assert waiting.add("a", 3)
    ((fetch,), released) = waiting.orders()
    assert (fetch.number, fetch.first, released) == (1, 0, [])
    waiting.end(1, ranks=(0,))
    assert waiting.waits("a", 8)
    waiting.end(1, ranks=(1,))
    assert not waiting.waits("a", 8)
    assert waiting.counters.totals() == {"requests_waited": 1, "chunks_prefetched": 3, "waited_us": 0}


@pytest.mark.parametrize("is_asked", [False, True])
def test_one_that_waits_for_too_long_is_given_up_and_its_chunks_released_later(is_asked: bool) -> None:
    waiting = Waiting()
    waiting.add("a", 3)
    waiting.orders()
    waiting.clock.now += TIMEOUT_S
    if is_asked:
        assert not waiting.waits("a", 8)
    assert waiting.orders() == ([], [])
    assert not waiting.waits("a", 8)
    waiting.clock.now += TIMEOUT_S
    assert waiting.orders() == ([], [1])
    waiting.end(1)
    waiting.leave("a")
    assert waiting.orders() == ([], [])
    waited_us = 1_000_000 * TIMEOUT_S
    assert waiting.counters.totals() == {
        "requests_waited": 1,
        "prefetches_given_up": 1,
        "waited_us": waited_us,
    }


def test_one_that_finds_no_room_begins_when_another_has_left_or_is_given_up() -> None:
    waiting = Waiting()
    assert waiting.add("a", 5)
    assert waiting.add("b", 5)
    assert [fetch.number for fetch in waiting.orders()[0]] == [1]
    waiting.end(1)
    assert waiting.waits("b", 8)
    assert waiting.orders() == ([], []), "what was fetched is still there"
    waiting.leave("a")
    assert waiting.waits("b", 8)
    begun, released = waiting.orders()
    assert ([fetch.number for fetch in begun], released) == ([2], [1])


def test_several_texts_of_one_request_are_one_load() -> None:
    """Else two requests that each have room for half of theirs would wait for each other."""
    waiting = Waiting()
    one, other = [keys(1, 2), keys(1, 2)], [keys(5, 6, 7), keys(5, 6, 7)]
    waiting.begin_all("a", [Wanted(one, 1, 2), Wanted(other, 0, 3)], 8)
    assert waiting.waits("a", 8)
    fetches, _ = waiting.orders()
    assert [(fetch.number, fetch.first, len(fetch.keys[0][1]) // 16) for fetch in fetches] == [
        (1, 1, 2),
        (2, 0, 3),
    ]
    assert waiting.num_coming == 4
    waiting.end(2)
    assert waiting.waits("a", 8)
    waiting.end(1)
    assert not waiting.waits("a", 8)
    waiting.leave("a")
    assert waiting.orders() == ([], [1, 2])


def test_several_texts_are_cut_to_the_limit_together() -> None:
    waiting = Waiting()
    wanted = [Wanted([keys(*range(9)), keys(*range(9))], first, 9) for first in (7, 0, 0)]
    waiting.begin_all("a", wanted, 5)
    assert waiting.waits("a", 5)
    assert [len(fetch.keys[0][1]) // 16 - fetch.first for fetch in waiting.orders()[0]] == [2, 3]


def test_a_request_that_has_waited_before_waits_no_longer_for_more() -> None:
    waiting = Waiting()
    chunks = [keys(1), keys(1)]
    waiting.clock.now += TIMEOUT_S
    waiting.begin_all("a", [Wanted(chunks, 0, 1)], 8, since=waiting.clock.now - TIMEOUT_S)
    assert not waiting.waits("a", 8)
    assert waiting.orders() == ([], [])


def test_one_larger_than_the_limit_gets_its_beginning() -> None:
    waiting = Waiting()
    assert waiting.add("a", 20)
    ((fetch,), _) = waiting.orders()
    assert len(fetch.keys[0][1]) == 8 * 16


def test_one_that_was_never_ordered_has_nothing_to_give_back() -> None:
    waiting = Waiting()
    waiting.add("a", 5)
    waiting.add("b", 5)
    waiting.leave("b")
    waiting.clear()
    assert waiting.orders() == ([], []), "what no worker has heard of is neither begun nor given back"
    assert "a" not in waiting


def test_a_measurement_is_a_few_chunks_of_one_fetch_at_a_time_given_back_when_it_has_ended() -> None:
    waiting = Waiting()
    chunks = keys(0, 1, 2, 3)
    for _ in range(2):
        waiting.measure([chunks, chunks], 1, 8, "disk")
    (fetch,), _ = waiting.orders()
    assert (fetch.first, len(fetch.keys[1][1]) // 16) == (1, 1 + CHUNKS_AT_A_TIME)
    assert waiting.num_coming == 0, "no request waits for it"
    waiting.end(fetch.number)
    assert waiting.orders() == ([], [fetch.number])
    waiting.measure([chunks, chunks], 3, 8, "disk")
    ((fetch,), _) = waiting.orders()
    assert len(fetch.keys[0][1]) // 16 == 4, "there is only one more"
    waiting.clock.now += 2 * TIMEOUT_S
    assert waiting.orders() == ([], [fetch.number])
    waiting.end(fetch.number)
    assert waiting.orders() == ([], [])
    assert waiting.counters.totals() == {}


def wait_for(there: set[int], clock: Clock, tier: str = "disk", chunk_s: float = 0.1) -> Wait:
    """A wait for three chunks of a tier whose speed is not known."""
    left = chunk_s * np.arange(4.0, 0, -1)
    patience = Patience(left, np.zeros(4), 0.01)
    return Wait(patience, there.__contains__, 0, [tier] * 3, clock.now)


def test_a_request_is_cut_short_when_it_is_better_off_with_what_has_come() -> None:
    waiting, there, chunks = Waiting(), set[int](), [keys(0, 1, 2)] * 2
    waiting.begin("a", chunks, 0, 3, 8, wait_for(there, waiting.clock))
    assert waiting.waits("a", 8)
    assert waiting.num_coming == 3
    there.add(0)
    waiting.clock.now += 0.1
    waiting.orders()
    assert waiting.waits("a", 8)
    assert waiting.num_coming == 2
    waiting.clock.now += 0.1
    waiting.orders()
    assert not waiting.waits("a", 8)
    wait = waiting.cut_short("a")
    assert wait is not None
    assert (wait.num_there, wait.tiers_missing) == (1, {"disk"})
    assert waiting.coming("a") == [1], "it may not find blocks to run in for long"
    waiting.end(1)
    assert (waiting.coming("a"), waiting.coming("b")) == ([], [])
    assert waiting.cut_short("a") is None, "it is given out once"
    counts = waiting.counters.totals()
    assert (counts["waits_cut_short"], counts["waited_us"]) == (1, 200_000)


def test_where_one_waits_in_vain_those_of_the_same_tier_do_not_wait_on() -> None:
    waiting, chunks = Waiting(), [keys(0, 1, 2)] * 2
    for name, tier, there in (("b", "disk", set()), ("c", "store", set()), ("d", "disk", set[int]())):
        wait = wait_for(there, waiting.clock, tier, 10.0)
        there |= {0} if name == "d" else set()
        waiting.begin(name, chunks, 0, 3, 8, wait)
    waiting.begin("a", chunks, 0, 3, 8, wait_for(set(), waiting.clock))
    assert all(waiting.waits(name, 20) for name in "abcd")
    waiting.orders()
    waiting.clock.now += 0.05
    assert [waiting.waits(name, 20) for name in "abcd"] == [False, False, True, True]


def test_a_tier_is_not_measured_while_what_is_on_its_way_shows_how_fast_it_is() -> None:
    waiting, chunks = Waiting(), [keys(0, 1, 2)] * 2
    waiting.begin("a", chunks, 0, 3, 8, wait_for(set(), waiting.clock))
    assert waiting.waits("a", 8)
    waiting.orders()
    waiting.measure(chunks, 0, 8, "disk")
    assert waiting.orders() == ([], [])
    waiting.clock.now += 5.0
    assert not waiting.waits("a", 8)
    assert waiting.cut_short("a") is not None
    waiting.measure(chunks, 0, 8, "disk")
    assert waiting.orders() == ([], [])
    waiting.measure(chunks, 0, 8, "store")
    assert [fetch.number for fetch in waiting.orders()[0]] == [2]
    waiting.end(1)
    waiting.end(2)
    waiting.measure(chunks, 0, 8, "disk")
    assert [fetch.number for fetch in waiting.orders()[0]] == [3]


def test_nothing_is_measured_where_there_is_no_room() -> None:
    waiting = Waiting()
    waiting.add("a", 8)
    waiting.measure([keys(0), keys(0)], 0, 8, "disk")
    assert [fetch.number for fetch in waiting.orders()[0]] == [1]


class Looks(dict[Hashable, WaitingLoad]):
    """Loads that count how often all of them are looked at."""

    number = 0

    def values(self) -> Any:
        self.number += 1
        return super().values()


def test_whether_one_of_many_has_to_wait_on_is_known_without_looking_at_the_others() -> None:
    waiting = Waiting()
    waiting._loads = looks = Looks()
    assert all(waiting.add(str(number), 4, most=10) for number in range(50))
    assert [fetch.number for fetch in waiting.orders()[0]] == [1, 2]
    looks.number = 0
    assert all(waiting.waits(str(number), 10) for number in range(50))
    assert looks.number == 1, "once a step, to end the waits of those that are better off without"
    waiting.leave("0")
    assert all(waiting.waits(str(number), 10) for number in range(1, 50))
    assert [fetch.number for fetch in waiting.orders()[0]] == [3]


def test_what_was_fetched_under_a_name_is_given_back_when_more_is_fetched_under_it() -> None:
    waiting = Waiting()
    assert waiting.add("a", 6)
    waiting.orders()
    assert waiting.add("a", 8)
    ((fetch,), released) = waiting.orders()
    assert (fetch.number, released) == (2, [1])
