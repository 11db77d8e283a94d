"""Only what comes sooner than it is computed is loaded, seen through the whole connector."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from integrations.vllm.scripted import CHUNK, LAYERS, ScriptedRequest
from integrations.vllm.test_slow_tiers import PROMPTS, busy, check, filled, step_until_it_hangs
from storage.faulty_tier import hanging

from lwkv.integrations.vllm.scheduler.lookup import costs as module
from lwkv.integrations.vllm.scheduler.lookup.measured.speeds import MEASURE_AGAIN_S
from lwkv.storage.prefetch import CHUNKS_AT_A_TIME


@pytest.fixture(autouse=True)
def look_ups_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups are on a thread of their own, which may have to wait for a core here."""
    monkeypatch.setattr(module, "LOOK_UP_S", 20.0)


def test_what_is_slower_than_computing_is_computed_once_and_then_in_host_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "lwkv.integrations.vllm.scheduler.lookup.step_costs")
    tier = filled()
    engine, decodes = busy(tier, compares_costs=True)
    costs = engine.scheduler.costs
    assert costs is not None
    costs._prefill.add(0.0, 1000, 0.001)
    costs._tiers.add("faulty", 0, 1, 1.0)
    first, second = (ScriptedRequest(name, PROMPTS[0], 2) for name in ("first", "second"))
    engine.add(first)
    while first.request_id not in engine.answers:
        engine.step()
    assert (engine.loaded, tier.calls_of("get")) == (0, [])
    assert "0 cached tokens are loaded" in caplog.text
    assert engine.scheduler.new_counts()["requests_cheaper_to_compute"] == 1
    assert engine.ranks[0].engine.parts().completions.wait_idle(20.0)
    engine.step()
    engine.add(second)
    engine.run()
    assert engine.loaded == 3 * CHUNK
    check(engine, first, second, decodes)


def test_a_tier_that_was_too_slow_is_measured_again_and_no_request_waits_for_that() -> None:
    tier = filled()
    engine, decodes = busy(tier, compares_costs=True)
    costs = engine.scheduler.costs
    assert costs is not None
    costs._prefill.add(0.0, 1000, 0.1)
    costs._tiers.add("faulty", 0, 1, 1.0)
    costs._tiers._speeds["faulty"][0].measured_at -= MEASURE_AGAIN_S  # type: ignore[operator]
    first = ScriptedRequest("first", PROMPTS[0], 2)
    engine.add(first)
    engine.run()
    while engine.scheduler.waiting._loads:
        engine.step()
    assert len({key.chunk for keys in tier.calls_of("get") for key in keys}) == 2
    assert costs._tiers.chunk_s("faulty") < 1.0
    check(engine, first, decodes)


def test_what_is_computed_after_all_is_not_read_beside_that() -> None:
    """Reads take the interpreter from the step that computes: no more of them than have begun."""
    tier = filled()
    tier.faults["get"] = fault = hanging()
    engine, decodes = busy(tier, compares_costs=True)
    costs = engine.scheduler.costs
    assert costs is not None
    costs._prefill.add(0.0, 1000, 8.0)
    first = ScriptedRequest("first", PROMPTS[0], 2)
    engine.add(first)
    step_until_it_hangs(engine, fault)
    while first.request_id not in engine.answers:
        engine.step()
    assert engine.loaded == 0
    tier.end_faults()
    engine.run()
    reads = Counter(key for keys in tier.calls_of("get") for key in keys)
    assert len(reads) == CHUNKS_AT_A_TIME * LAYERS
    assert set(reads.values()) == {1}, "not read again to measure the tier, which this did"
    assert costs._tiers.chunk_s("faulty") > 0
    check(engine, first, decodes)


def test_it_can_be_turned_off() -> None:
    engine, decodes = busy(filled(), compares_costs=False)
    assert engine.scheduler.costs is None
    loads = ScriptedRequest("loads", PROMPTS[0], 2)
    engine.add(loads)
    engine.run()
    assert engine.loaded == 3 * CHUNK
    check(engine, loads, decodes)


def test_steps_and_tiers_are_measured_while_the_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lwkv.integrations.vllm.scheduler.lookup.costs.LEAST_TOKENS", 16)
    monkeypatch.setattr("lwkv.integrations.vllm.scheduler.lookup.measured.timed_steps.LEAST_TOKENS", 16)
    engine, decodes = busy(filled(), compares_costs=True)
    requests = [ScriptedRequest(f"new {number}", list(range(500, 540)), 1) for number in range(2)]
    requests += [ScriptedRequest("waits", PROMPTS[0], 2)]
    for request in requests:
        engine.add(request)
        while request.request_id not in engine.answers:
            engine.step()
    counts, speeds = (
        engine.scheduler.new_counts(),
        ("prefill_tokens_per_s/rank0", "faulty_chunks_per_s/rank0"),
    )
    while not counts.keys() >= set(speeds):  # the request may not have waited until the tier was measured
        engine.step()
        counts |= engine.scheduler.new_counts()
    assert all(counts[speed] > 0 for speed in speeds)
    engine.run()
    check(engine, *requests, decodes)
