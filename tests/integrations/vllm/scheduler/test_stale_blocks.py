"""Nothing is stored out of blocks that hold garbage, whoever uses them; where vLLM itself answers wrongly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from integrations.vllm.scripted import BLOCK, Scripted, ScriptedRequest, expected
from integrations.vllm.test_scripted import History

from lwkv.integrations.vllm.scheduler.scheduled import ScheduledRequest
from lwkv.integrations.vllm.scheduler.stale_blocks import StaleBlocks

SHARED = list(range(300, 332))
ONE = [*SHARED, *range(500, 540)]
OTHER = [*SHARED, *range(400, 430)]


def engine_of(**settings: Any) -> Scripted:
    """An engine in whose cache, but not in whose blocks, the shared beginning is."""
    engine = Scripted(5, budget=64, shares_failures=True, host_chunks=60, num_blocks=80, **settings)
    engine.add(ScriptedRequest("cached", SHARED, 1))
    engine.run()
    engine.blocks.known.clear()
    return engine


def evict_before_the_load(engine: Scripted) -> None:
    """Have the chunks of the next load go between lookup and load."""
    worker = engine.ranks[0].worker
    begin = worker.begin

    def evicts(orders: Any) -> None:
        if orders.loads:
            worker.begin = begin  # type: ignore[method-assign]
            engine.ranks[0].engine.flush()
            host = engine.ranks[0].engine.parts().storage.host
            host.evict(host.evictable())
        begin(orders)

    worker.begin = evicts  # type: ignore[method-assign]


def fail_on_the_device(engine: Scripted) -> None:
    engine.ranks[0].fails_at = 1


def assert_right_from_the_cache(engine: Scripted, *prompts: Sequence[int]) -> None:
    """Ask without vLLM's own blocks, twice: the second time with what the first has stored."""
    for number in range(2):
        for tokens in prompts:
            engine.blocks.known.clear()
            name = f"again {number} {tokens[-1]}"
            engine.add(ScriptedRequest(name, list(tokens), 1))
            engine.run()
            assert engine.answers[name] == [expected(tokens, 1)]
    assert engine.failed == 8
    engine.close()


def engine_with_a_failed_load(fail: Any, most: int) -> Scripted:
    """Two requests have run that shared it: one computed again what was lost, the other ran on."""
    engine = engine_of(most=most)
    fail(engine)
    engine.add(ScriptedRequest("computes again", ONE, 1))
    engine.add(ScriptedRequest("runs on", OTHER, 1))
    engine.run()
    return engine


@pytest.mark.parametrize("fail", [evict_before_the_load, fail_on_the_device])
@pytest.mark.parametrize("most", [5, 7, 8, 64])
def test_nothing_wrong_is_found_where_two_requests_share_a_load_that_failed(fail: Any, most: int) -> None:
    engine = engine_with_a_failed_load(fail, most)
    assert_right_from_the_cache(engine, [*SHARED, 1, 2, 3], ONE, OTHER, [*OTHER, 4, 5])


@pytest.mark.parametrize("fail", [evict_before_the_load, fail_on_the_device])
@pytest.mark.parametrize("most", [7, 8])
def test_what_comes_upon_blocks_that_were_computed_on_garbage_is_not_stored(fail: Any, most: int) -> None:
    engine = engine_with_a_failed_load(fail, most)
    longer = [*OTHER, *range(600, 609)]
    engine.add(ScriptedRequest("upon that", longer, 1))
    engine.run()
    assert_right_from_the_cache(engine, longer, OTHER)


@pytest.mark.parametrize("fail", [evict_before_the_load, fail_on_the_device])
def test_blocks_of_a_failed_load_are_not_stored_by_others_when_its_request_was_aborted(fail: Any) -> None:
    engine = engine_of()
    fail(engine)
    aborted = ScriptedRequest("aborted", ONE, 5)
    engine.add(aborted)
    engine.step()
    engine.abort(aborted)
    engine.add(ScriptedRequest("upon that", OTHER, 1))
    engine.run()
    assert_right_from_the_cache(engine, [*SHARED, 7], [*SHARED, 8], OTHER)


def test_what_a_request_computed_that_ended_before_its_load_was_known_to_fail_counts_too() -> None:
    engine = engine_of(ahead=True)
    evict_before_the_load(engine)
    ended = ScriptedRequest("ended", ONE, 5)
    engine.add(ended)
    engine.step()
    blocks = list(ended.blocks)
    engine.abort(ended)
    engine.add(ScriptedRequest("elsewhere", [1, 2, 3], 1))
    engine.step()
    stale = engine.scheduler._requests._stale
    assert all(stale.concern(stale.additions, [block]) for block in blocks)
    engine.run()
    engine.close()


def test_a_name_that_is_used_again_at_once_loads_what_was_promised() -> None:
    engine = engine_of()
    first = ScriptedRequest("name", list(range(100, 150)), 5)
    engine.add(first)
    engine.step()
    engine.abort(first)
    engine.add(ScriptedRequest("name", ONE, 1))
    engine.run()
    assert engine.loaded == len(SHARED)
    assert engine.answers["name"] == [expected(ONE, 1)]
    engine.close()


def test_a_stale_block_that_stays_has_running_requests_looked_at_once() -> None:
    engine = engine_of()
    scheduler = engine.scheduler
    engine.add(ScriptedRequest("decodes", ONE, 20))
    while not engine.running or engine.running[0].num_tokens == len(ONE):
        engine.step()
    looked_at = []
    requests = scheduler._requests
    blocks = requests._blocks
    requests._blocks = lambda *a: looked_at.append(a) or blocks(*a)  # type: ignore[func-returns-value,method-assign]
    scheduler.learn_failed_blocks({79})
    engine.run()
    assert len(looked_at) == 1
    engine.close()


def steps_of(blocks: list[int], *ends: int, begin: int = 0) -> Iterator[ScheduledRequest]:
    """One request whose steps end with so many tokens in place."""
    tracked: Any = SimpleNamespace(spoiled_from=None, tested_after=0)
    for end in ends:
        yield ScheduledRequest(tracked, begin, begin, end, lambda: blocks)
        begin = end


@pytest.mark.parametrize("ends", [(8,), (3, 8), (1, 2, 3, 4, 5, 6, 7, 8), (5, 6, 8)])
def test_blocks_are_sound_when_all_of_their_tokens_were_computed_again(ends: tuple[int, ...]) -> None:
    stale = StaleBlocks(BLOCK)
    stale.add({0, 1, 2})  # 0 is no request's
    assert len(stale) == 2
    for step in steps_of([1, 2], *ends):
        assert len(stale) > 0
        stale.pass_step([step])
        assert step.tracked.spoiled_from is None
    assert len(stale) == 0


def test_a_block_that_was_computed_again_in_part_is_garbage_to_others() -> None:
    stale = StaleBlocks(BLOCK)
    stale.add({1, 2})
    (again,) = steps_of([1, 2], 7)
    (other,) = steps_of([1, 2, 3], 10, begin=8)
    stale.pass_step([other, again])
    assert (again.tracked.spoiled_from, other.tracked.spoiled_from) == (None, BLOCK)
    assert stale.concern(stale.additions, [3])
    assert not stale.concern(stale.additions, [1])


def test_garbage_goes_on_within_one_step_in_any_order() -> None:
    stale = StaleBlocks(BLOCK)
    stale.add({1})
    (runs_on,) = steps_of([1, 2], 8, begin=4)
    (upon_that,) = steps_of([1, 2, 3], 10, begin=8)
    (afresh,) = steps_of([4, 5], 8)
    stale.pass_step([upon_that, afresh, runs_on])
    assert [item.tracked.spoiled_from for item in (runs_on, upon_that, afresh)] == [0, 0, None]
    assert len(stale) == 3


KINDS = {
    "no prefix cache": {"own_cache": False},
    "small steps": {"most": 7, "budget": 64},
    "ahead": {"ahead": True, "budget": 10},
    "ahead, two ranks, no prefix cache": {"ahead": True, "num_ranks": 2, "own_cache": False, "budget": 10},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_is_right_whatever_happened_and_whatever_was_answered(kind: str, seed: int) -> None:
    engine = Scripted(seed, shares_failures=True, host_chunks=60, **KINDS[kind])
    history = History(engine, prefixes=2)
    for _ in range(60):
        history.happen()
        engine.step()
    engine.run()
    for rank in engine.ranks:
        rank.fails_at = None
    engine.loaded = 0
    for request in history.requests:
        engine.blocks.known.clear()
        for rest in ([], engine.answers[request.request_id]):
            tokens = [*request.prompt_token_ids, *rest, 5]
            name = f"again {request.request_id} {len(rest)}"
            engine.add(ScriptedRequest(name, tokens, 1))
            engine.run()
            assert engine.answers[name] == [expected(tokens, engine.num_ranks)]
    assert engine.loaded > 0
    engine.at_rest()
    engine.close()
