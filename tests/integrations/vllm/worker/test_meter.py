from __future__ import annotations

import pytest
from integrations.vllm.scripted import CHUNK, LAYERS, RankOfModel, Scripted, ScriptedRequest
from integrations.vllm.worker.test_side import move, run
from storage.rig import Clock

from lwkv.integrations.vllm.orders import StepOrders
from lwkv.integrations.vllm.worker.meter import QUIET_S, WorkerMeter, summed_over_ranks
from lwkv.telemetry.counters import Counters

STORE = StepOrders(1, 0, [], [move([])])


def test_what_goes_on_beside_steps_that_move_nothing_is_reported_now_and_then() -> None:
    rank = RankOfModel(0, 1, 16, 8, {})
    clock = Clock()
    meter = WorkerMeter(rank.engine, 0, Counters(), clock)
    run(rank, STORE)
    assert rank.engine.flush()
    news = meter.new_counts(True)
    assert news["tokens_stored"] == 2 * CHUNK
    rank.engine.parts().counters.add("disk_errors")
    assert meter.new_counts(False) == {}
    clock.now += QUIET_S
    assert meter.new_counts(False)["disk_errors"] == 1
    assert "disk_errors" not in meter.new_counts(True)
    rank.worker.close()


def test_host_memory_in_use_and_its_capacity_are_gauges_of_each_rank() -> None:
    rank = RankOfModel(1, 2, 16, 8, {})
    meter = WorkerMeter(rank.engine, 1, Counters(), Clock())
    page = 4096
    gauges = {"host_used_bytes/rank1": 0, "host_capacity_bytes/rank1": 8 * LAYERS * page}
    assert {name: count for name, count in meter.new_counts(True).items() if "/" in name} == gauges
    run(rank, STORE)
    assert rank.engine.flush()
    assert meter.new_counts(True)["host_used_bytes/rank1"] == 2 * LAYERS * page
    rank.worker.close()


def test_gauges_of_all_ranks_are_added_up() -> None:
    numbers = {"a": 1, "host_used_bytes/rank0": 2, "host_used_bytes/rank1": 3}
    assert summed_over_ranks(numbers) == {"a": 1, "host_used_bytes": 5}


@pytest.mark.parametrize("fails", [False, True])
def test_what_becomes_of_a_failed_load_is_counted_and_logged_as_the_policy_says(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Scripted(4, own_cache=False, budget=200, host_chunks=40)
    engine.add(ScriptedRequest("cached", list(range(24)), 1))
    engine.run()
    assert engine.ranks[0].engine.flush()
    engine.add(ScriptedRequest("elsewhere", [1, 2, 3], 1))
    engine.run()  # the scheduler hears of it
    engine.ranks[0].worker._fails = fails
    engine.ranks[0].worker.new_counts()
    engine.ranks[0].fails_at = 0
    engine.add(ScriptedRequest("fails", list(range(30)), 1))
    engine.add(ScriptedRequest("beside", list(range(100, 150)), 1))
    engine.step()
    news = engine.ranks[0].worker.new_counts()
    assert news.get("tokens_recomputed", 0) == (0 if fails else 24)
    assert news.get("requests_failed", 0) == fails
    assert news["stores_dropped"] == 1, "of what was computed beside it"
    said = "vLLM fails their request" if fails else "vLLM computes them again"
    assert [said in message for message in caplog.messages if "could not be loaded" in message] == [True]
    engine.run()
    engine.close()


def test_stores_of_a_step_that_was_given_up_are_counted() -> None:
    rank = RankOfModel(0, 1, 16, 8, {})
    rank.worker.begin(STORE)
    rank.worker.begin(StepOrders(2, 0))
    assert rank.worker.new_counts()["stores_dropped"] == 1
    rank.worker.close()
