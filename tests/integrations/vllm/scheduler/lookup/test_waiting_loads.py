from __future__ import annotations

import pytest
from storage.rig import Clock, keys

from lwkv.integrations.vllm.reports import RankInfo, RankReport
from lwkv.integrations.vllm.scheduler.lookup.waiting_loads import WaitingLoads, Wanted
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
    assert waiting.counters.totals() == {"requests_waited": 1, "chunks_prefetched": 3}


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
    assert waiting.counters.totals() == {"requests_waited": 1, "prefetches_given_up": 1}


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
    assert waiting.orders()[1] == [1]
    assert "a" not in waiting


def test_a_measurement_is_one_chunk_of_one_fetch_at_a_time_given_back_when_it_has_ended() -> None:
    waiting = Waiting()
    chunks = keys(0, 1, 2)
    for _ in range(2):
        waiting.measure([chunks, chunks], 1, 8)
    (fetch,), _ = waiting.orders()
    assert (fetch.first, len(fetch.keys[1][1])) == (1, 2 * 16)
    assert waiting.num_coming == 0, "no request waits for it"
    waiting.end(fetch.number)
    assert waiting.orders() == ([], [fetch.number])
    waiting.measure([chunks, chunks], 1, 8)
    ((fetch,), _) = waiting.orders()
    waiting.clock.now += 2 * TIMEOUT_S
    assert waiting.orders() == ([], [fetch.number])
    waiting.end(fetch.number)
    assert waiting.orders() == ([], [])
    assert waiting.counters.totals() == {}


def test_nothing_is_measured_where_there_is_no_room() -> None:
    waiting = Waiting()
    waiting.add("a", 8)
    waiting.measure([keys(0), keys(0)], 0, 8)
    assert [fetch.number for fetch in waiting.orders()[0]] == [1]
