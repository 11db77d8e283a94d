"""Segments in lower tiers are brought while their prompt waits, or are missing; no step waits for a tier."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integrations.vllm.blending.planner_bench import (
    SEGMENTS,
    SIZES,
    TIMEOUT_S,
    Bench,
    FakeRequest,
)

from lwkv.integrations.vllm.orders import Fetch
from lwkv.integrations.vllm.scheduler.lookup.found_chunks import ASK_AGAIN_S
from lwkv.integrations.vllm.scheduler.lookup.look_ups import LookUps

BLOCKS = list(range(1, 16))


def on_disk(num_ranks: int = 1, **more: int) -> tuple[Bench, FakeRequest]:
    """A prompt whose segments are in a lower tier."""
    bench = Bench(num_ranks=num_ranks, **more)
    one = bench.follow(FakeRequest())
    bench.evict(one, *SEGMENTS, lower=True)
    return bench, one


def brought(bench: Bench, fetches: list[Fetch], rank: int = 0) -> None:
    """Have a rank report that it has all that it was to fetch."""
    for fetch in fetches:
        namespace, hashes = fetch.keys[rank]
        assert namespace == f"model-{rank}-segment"
        whole = [hashes[at : at + 16] for at in range(0, len(hashes), 16)]
        bench.report(rank, kept=whole[fetch.first :], fetched=[fetch.number])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_prompt_waits_for_what_lower_tiers_bring_and_is_blended_then(num_ranks: int) -> None:
    bench, one = on_disk(num_ranks)
    assert bench.planner.claim(one, 0, 0) is None
    fetches, _ = bench.waiting.orders()
    assert [(fetch.first, len(fetch.keys[0][1]) // 16) for fetch in fetches] == [(0, 2), (0, 3)]
    for rank in range(num_ranks):
        assert bench.planner.claim(one, 0, 0) is None
        brought(bench, fetches, rank)
    assert bench.planner.claim(one, 0, 0) == 40
    assert bench.planner.allocated(one, [], 40)
    assert bench.planner.encode(one, (), BLOCKS) == []
    bench.planner.end("one")
    assert bench.waiting.orders() == ([], [fetch.number for fetch in fetches])


def test_only_what_the_blend_needs_is_brought() -> None:
    """Nothing in front of the exact prefix, nothing that a step has no room to blend."""
    bench, one = on_disk()
    assert bench.planner.claim(one, 8, 12) is None
    assert [fetch.first for fetch in bench.waiting.orders()[0]] == [1, 0]
    bench = Bench(replace(SIZES, most_rows=11))
    one = bench.follow(FakeRequest())
    bench.evict(one, *SEGMENTS, lower=True)
    assert bench.planner.claim(one, 0, 0) is None
    (fetch,), _ = bench.waiting.orders()
    assert fetch.keys[0][1] == b"".join(bench.hashes(one, SEGMENTS[0]))
    assert bench.planner.encode(one, (), BLOCKS) == [], "the other one is cached"


def test_what_an_exact_prefix_covers_is_not_brought() -> None:
    bench, one = on_disk()
    assert bench.planner.claim(one, 0, 40) == 0
    assert bench.waiting.orders() == ([], [])


def test_what_is_in_host_memory_is_waited_for_by_nobody_and_no_tier_is_asked() -> None:
    bench = Bench()
    one = bench.follow(FakeRequest())
    bench.cache(one, *SEGMENTS)
    assert bench.planner.claim(one, 0, 0) == 40
    assert bench.shelves[0].asked == []


def test_a_look_up_that_hangs_holds_nobody_up_and_is_asked_for_once() -> None:
    bench = Bench(look_ups=LookUps())
    one, two = bench.follow(FakeRequest()), bench.follow(FakeRequest("two", segments=()))
    bench.evict(one, *SEGMENTS, lower=True)
    bench.shelves[0].answers.clear()
    for _ in range(3):
        assert bench.planner.claim(one, 0, 0) is None
        assert bench.planner.claim(two, 0, 0) == 0
    bench.shelves[0].answers.set()
    assert bench.look_ups.wait_idle(20)
    assert bench.planner.claim(one, 0, 0) is None
    assert bench.waiting.orders()[0]
    asked = [key.hash for key in bench.shelves[0].asked]
    assert asked == [each for part in SEGMENTS for each in bench.hashes(one, part)]


def test_what_does_not_come_in_time_is_missing_and_encoded_again() -> None:
    bench, one = on_disk()
    assert bench.planner.claim(one, 0, 0) is None
    fetches, _ = bench.waiting.orders()
    brought(bench, fetches[:1])
    bench.now = TIMEOUT_S
    assert bench.planner.claim(one, 0, 0) == 16
    assert bench.planner.allocated(one, [], 16)
    (order,) = bench.planner.encode(one, (), BLOCKS)
    assert len(order.tokens) == SEGMENTS[1][1] - SEGMENTS[1][0]
    bench.now = 2 * TIMEOUT_S
    assert bench.waiting.orders()[1] == [fetch.number for fetch in fetches]
    assert bench.counters.totals()["prefetches_given_up"] == 1


def test_it_waits_no_longer_for_its_prefix_and_its_segments_together() -> None:
    bench, one = on_disk()
    keys = [bench.keys(one, (0, 8))]
    bench.waiting.begin("one", keys, 0, 1, 4)
    bench.now = TIMEOUT_S
    assert bench.planner.claim(one, 0, 0) == 0
    assert bench.waiting.orders() == ([], [])


def test_a_chunk_that_could_not_be_loaded_is_not_asked_for_again() -> None:
    bench, one = on_disk()
    bench.report(failed=[each for part in SEGMENTS for each in bench.hashes(one, part)])
    assert bench.planner.claim(one, 0, 0) == 0
    assert len(bench.planner.encode(one, (), BLOCKS)) == 2


def test_what_a_tier_gets_while_a_prompt_waits_is_found_a_second_later() -> None:
    bench = Bench()
    one, two = (bench.follow(FakeRequest(name)) for name in ("one", "two"))
    assert bench.planner.claim(one, 0, 0) == 0
    bench.shelves[0].hashes.update(bench.hashes(one, SEGMENTS[0]))
    assert bench.planner.claim(one, 0, 0) == 0
    bench.now = ASK_AGAIN_S
    assert bench.planner.claim(one, 0, 0) is None
    assert bench.planner.claim(two, 0, 0) is None


@pytest.mark.parametrize("more", [{"fetches": False}, {"most_chunks": 1}], ids=["off", "no room"])
def test_where_nothing_can_be_brought_it_is_computed(more: dict[str, int]) -> None:
    bench, one = on_disk(**more)
    assert bench.planner.claim(one, 0, 0) == 0
    assert bench.waiting.orders() == ([], [])


def test_a_request_that_ends_while_it_waits_gives_everything_back() -> None:
    bench, one = on_disk()
    assert bench.planner.claim(one, 0, 0) is None
    numbers = [fetch.number for fetch in bench.waiting.orders()[0]]
    bench.planner.end("one")
    assert bench.waiting.orders() == ([], numbers)
    assert bench.planner.claim(bench.follow(FakeRequest()), 0, 0) is None, "another one of its name"


def test_after_a_reset_nobody_waits() -> None:
    bench, one = on_disk()
    assert bench.planner.claim(one, 0, 0) is None
    bench.planner.reset()
    assert bench.planner.claim(one, 0, 0) == 0
    assert bench.waiting.num_coming == 0


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_prompt_is_scheduled_within_the_deadline_and_nothing_is_left(data: st.DataObject) -> None:
    """Some segments are in host memory, some below it, of which some come, some are lost, some are late."""
    bench = Bench(num_ranks=2, most_chunks=data.draw(st.sampled_from([4, 6, 40])))
    names = ["one", "two", "three"]
    requests = [
        bench.follow(FakeRequest(name, [number, *range(101, 160)])) for number, name in enumerate(names)
    ]
    for part in SEGMENTS:
        place = data.draw(st.sampled_from(["host", "lower", "nowhere"]))
        bench.cache(requests[0], *([part] if place == "host" else []))
        bench.evict(requests[0], *([part] if place == "lower" else []), lower=True)
    waiting = {request.request_id: request for request in requests}
    while waiting:
        assert bench.now <= 3 * TIMEOUT_S
        for name, request in list(waiting.items()):
            if data.draw(st.integers(0, 9)) == 0:
                bench.planner.end(waiting.pop(name).request_id)
                continue
            claimed = bench.planner.claim(request, 0, 0)
            if claimed is None:
                continue
            assert bench.planner.allocated(request, [], claimed) == (claimed > 0)
            if claimed:
                order = bench.planner.blend(request, (), BLOCKS)
                assert order is not None
                assert order.end == claimed
                for part in order.segments:
                    keys = [bench.keys(request, part, rank) for rank in range(2)]
                    assert bench.index.has(keys, 0)
            bench.planner.encode(request, (), BLOCKS)
            bench.planner.end(waiting.pop(name).request_id)
        fetches, _ = bench.waiting.orders()
        for fetch in fetches:
            for rank in range(2):
                if data.draw(st.booleans()):
                    brought(bench, [fetch], rank)
                elif data.draw(st.booleans()):
                    bench.report(rank, fetched=[fetch.number])
        bench.step()
        bench.now += data.draw(st.sampled_from([0.1, 3.0]))
    assert bench.waiting.num_coming == 0
    assert len(bench.planner) == 0
    assert not bench.waiting._loads
