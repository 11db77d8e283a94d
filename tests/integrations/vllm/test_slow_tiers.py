"""What is in a lower tier comes to host memory while its request waits; no other request waits for that."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from integrations.vllm.scripted import CHUNK, LAYERS, Scripted, ScriptedRequest, expected
from integrations.vllm.test_scripted import History
from storage.faulty_tier import Fault, FaultyTier, hanging

from lwkv.integrations.vllm.reports import RankReport
from lwkv.integrations.vllm.scheduler.lookup import tier_lookup

PROMPTS = [[prompt * 100 + token for token in range(3 * CHUNK + 1)] for prompt in range(4)]
BUSY = [900, 901, 902]


def filled(num_ranks: int = 1) -> FaultyTier:
    """A tier that has all chunks of the prompts."""
    tier = FaultyTier()
    engine = Scripted(0, num_ranks, own_cache=False, lower=[tier])
    for number, prompt in enumerate(PROMPTS):
        engine.add(ScriptedRequest(f"stores {number}", prompt, 1))
        engine.run()
    engine.at_rest()
    pages = dict(tier.pages)
    engine.close()
    tier = FaultyTier()
    tier.pages = pages
    return tier


def busy(
    tier: FaultyTier, num_ranks: int = 1, host_chunks: int = 16, **options: Any
) -> tuple[Scripted, ScriptedRequest]:
    """An engine with empty host memory, in which one request decodes for long."""
    engine = Scripted(0, num_ranks, 200, host_chunks, own_cache=False, lower=[tier], **options)
    decodes = ScriptedRequest("decodes", BUSY, 250)
    engine.add(decodes)
    engine.step()
    return engine, decodes


def step_until_it_hangs(engine: Scripted, fault: Fault) -> None:
    """Step until a call of the tier is under way that does not end."""
    while not fault.entered.wait(0.002):
        engine.step()


def check(engine: Scripted, *requests: ScriptedRequest) -> None:
    """All answers are right, and nothing is held."""
    for request in requests:
        tokens = list(request.prompt_token_ids)
        for token in engine.answers[request.request_id]:
            assert token == expected(tokens, engine.num_ranks)
            tokens.append(token)
    engine.at_rest()
    engine.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_others_decode_while_a_request_waits_and_then_it_is_loaded_from_host_memory(num_ranks: int) -> None:
    tier = filled(num_ranks)
    tier.faults["get"] = fault = hanging()
    engine, decodes = busy(tier, num_ranks)
    waits = ScriptedRequest("waits", PROMPTS[0], 2)
    engine.add(waits)
    step_until_it_hangs(engine, fault)
    before = decodes.num_tokens
    for _ in range(20):
        engine.step()
    assert decodes.num_tokens == before + 20, "a token in each step"
    assert waits in engine.waiting
    tier.end_faults()
    engine.run()
    assert (engine.loaded, engine.failed) == (3 * CHUNK, 0)
    reads = Counter(key for keys in tier.calls_of("get") for key in keys)
    assert len(reads) == 3 * LAYERS * num_ranks
    assert set(reads.values()) == {1}, "each page is read once"
    for rank in engine.ranks:
        assert rank.engine.stats()["host_hits"] == 3
    counts = engine.scheduler.new_counts()
    assert (counts["chunks_prefetched"], counts["requests_waited"]) == (3, 1)
    check(engine, waits, decodes)


def test_a_request_that_is_alone_loads_from_the_tier_at_once() -> None:
    engine = Scripted(0, own_cache=False, lower=[filled()])
    alone = ScriptedRequest("alone", PROMPTS[0], 2)
    engine.add(alone)
    engine.run()
    assert engine.loaded == 3 * CHUNK
    assert "requests_waited" not in engine.scheduler.new_counts()
    check(engine, alone)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_frozen_tier_holds_its_request_up_until_the_timeout_and_nobody_else(num_ranks: int) -> None:
    tier = filled(num_ranks)
    tier.faults["get"] = hanging()
    engine, decodes = busy(tier, num_ranks, load_timeout_s=0.3)
    waits = ScriptedRequest("waits", PROMPTS[0], 2)
    engine.add(waits)
    while waits in engine.waiting:
        before = decodes.num_tokens
        engine.step()
        assert decodes.num_tokens == before + 1 or decodes not in engine.running
    assert engine.loaded == 0
    engine.run()
    assert engine.scheduler.new_counts()["prefetches_given_up"] == 1
    for rank in engine.ranks:
        assert rank.engine.parts().completions.wait_idle(20.0)
        assert rank.engine.stats()["chunks"] == 3, "computed once, then in host memory"
    tier.end_faults()
    check(engine, waits, decodes)


def test_a_tier_that_dies_leaves_its_request_to_be_computed() -> None:
    tier = filled()
    tier.faults["get"] = Fault(RuntimeError("down"))
    engine, decodes = busy(tier)
    waits = ScriptedRequest("waits", PROMPTS[0], 2)
    engine.add(waits)
    engine.run()
    assert (engine.loaded, engine.failed) == (0, 0)
    check(engine, waits, decodes)


def test_a_page_that_is_missing_costs_its_request_the_chunks_from_there_on_and_no_load_fails() -> None:
    tier = filled()
    del tier.pages[next(key for key in tier.pages if key.layer == LAYERS - 1)]
    engine, decodes = busy(tier)
    requests = [ScriptedRequest(f"waits {number}", prompt, 2) for number, prompt in enumerate(PROMPTS)]
    for request in requests:
        engine.add(request)
    engine.run()
    assert engine.failed == 0
    assert 3 * 3 * CHUNK <= engine.loaded < 4 * 3 * CHUNK
    check(engine, *requests, decodes)


@pytest.mark.parametrize("when", ["on the way", "there"])
def test_a_request_that_is_aborted_while_it_waits_gives_everything_back(when: str) -> None:
    tier = filled()
    tier.faults["get"] = fault = hanging()
    engine, decodes = busy(tier)
    aborted = ScriptedRequest("aborted", PROMPTS[0], 2)
    engine.add(aborted)
    step_until_it_hangs(engine, fault)
    if when == "there":
        tier.end_faults()
        assert engine.ranks[0].engine.flush()
    engine.abort(aborted)
    engine.step()
    tier.end_faults()
    engine.run()
    check(engine, decodes)


def test_no_more_than_half_of_host_memory_is_fetched_at_a_time_and_all_get_their_turn() -> None:
    engine, decodes = busy(filled(), host_chunks=8)
    requests = [ScriptedRequest(f"waits {number}", prompt, 2) for number, prompt in enumerate(PROMPTS)]
    for request in requests:
        engine.add(request)
    most = 0
    while engine.waiting:
        engine.step()
        held = [load.room for load in engine.scheduler.waiting._loads.values() if load.is_held]
        most = max(most, sum(held))
    assert 3 <= most <= 4
    engine.run()
    assert engine.loaded == 4 * 3 * CHUNK
    check(engine, *requests, decodes)


@pytest.mark.parametrize("host_chunks", [1, 2, 3])
def test_with_next_to_no_host_memory_all_requests_are_answered(host_chunks: int) -> None:
    engine, decodes = busy(filled(), host_chunks=host_chunks)
    requests = [ScriptedRequest(f"waits {number}", prompt, 2) for number, prompt in enumerate(PROMPTS)]
    for request in requests:
        engine.add(request)
    engine.run()
    check(engine, *requests, decodes)


def test_news_that_come_during_a_look_up_are_looked_up_on_the_side_too() -> None:
    tier = filled()
    engine, decodes = busy(tier)
    tier.faults["contains", 0] = fault = hanging()
    waits = ScriptedRequest("waits", PROMPTS[0], 2)
    engine.add(waits)
    step_until_it_hangs(engine, fault)
    index = engine.scheduler.index
    keys = index.keys(np.array(PROMPTS[0]), ())[0]
    index.learn(RankReport(engine.ranks[0].worker.info, 0, dropped=[keys[0].hash]))
    tier.faults["contains", 1] = hanging()
    assert fault.gate is not None
    fault.gate.set()
    assert engine.scheduler.look_ups.wait_idle(20.0)
    before = decodes.num_tokens
    for _ in range(3):
        engine.step()
    assert decodes.num_tokens == before + 3
    tier.end_faults()
    engine.run()
    assert engine.loaded == 3 * CHUNK
    check(engine, waits, decodes)


def test_it_can_be_turned_off() -> None:
    engine, decodes = busy(filled(), prefetches=False)
    loads = ScriptedRequest("loads", PROMPTS[0], 2)
    engine.add(loads)
    engine.run()
    assert (engine.loaded, engine.waits) == (3 * CHUNK, 0)
    check(engine, loads, decodes)


def test_a_look_up_that_hangs_holds_up_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_lookup, "ANSWER_S", 5.0)
    tier = filled()
    engine, decodes = busy(tier)
    tier.faults["contains"] = hanging()
    waits = ScriptedRequest("waits", PROMPTS[0], 2)
    engine.add(waits)
    before = decodes.num_tokens
    for _ in range(20):
        engine.step()
    assert decodes.num_tokens == before + 20
    assert waits in engine.waiting
    tier.end_faults()
    engine.run()
    assert engine.loaded == 3 * CHUNK
    check(engine, waits, decodes)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_histories_with_a_tier_that_fails_now_and_then(num_ranks: int) -> None:
    tier = FaultyTier()
    for call in range(5, 400, 7):
        tier.faults["get", call] = Fault(RuntimeError("now and then"))
    history = History(Scripted(3, num_ranks, lower=[tier], own_cache=False, load_timeout_s=5.0))
    history.play(150)
    assert history.engine.waits > 0


def test_a_step_waits_for_a_tier_no_longer_than_its_orders_say() -> None:
    """A request that is alone loads while its step computes; its tier freezes, and all is computed."""
    tier = filled()
    engine = Scripted(0, own_cache=False, lower=[tier], load_timeout_s=1000.0)
    tier.faults["get"] = hanging()
    orders = engine.scheduler.orders
    engine.scheduler.orders = lambda output: replace(  # type: ignore[method-assign]
        orders(output), load_within_s=0.05
    )
    alone = ScriptedRequest("alone", PROMPTS[0], 2)
    engine.add(alone)
    engine.run()
    assert engine.failed > 0
    tier.end_faults()
    check(engine, alone)
