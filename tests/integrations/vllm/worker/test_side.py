from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from integrations.vllm.scripted import BLOCK, CHUNK, LAYERS, RankOfModel
from oracle import held_completions, require_rest

from lwkv.integrations.host_memory import MEMORY_S
from lwkv.integrations.vllm.blending.orders import BlendOrder
from lwkv.integrations.vllm.orders import Move, StepOrders, packed
from lwkv.integrations.vllm.reports import RankReport
from lwkv.keys import chunk_keys
from lwkv.pipeline import prompt_keys


def move(keys: list[tuple[str, bytes]]) -> Move:
    tokens = np.arange(2 * CHUNK)
    return Move(tokens, ("salt",), np.arange(1, 1 + len(tokens) // BLOCK), 0, len(tokens), keys)


def test_keys_that_come_with_the_orders_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = RankOfModel(0, 1, 16, 8, {})
    keys = chunk_keys(range(2 * CHUNK), CHUNK, rank.engine.namespace, ["salt"])
    monkeypatch.setattr(prompt_keys, "chunk_keys", None)
    rank.worker.begin(StepOrders(1, 0, [], [move([packed(keys)])]))
    assert rank.engine.keys(range(2 * CHUNK), ["salt"]) == keys
    rank.worker.close()


def test_keys_of_another_namespace_or_number_are_not_taken_over() -> None:
    rank = RankOfModel(0, 1, 16, 8, {})
    keys = chunk_keys(range(2 * CHUNK), CHUNK, rank.engine.namespace, ["salt"])
    hashes = packed(keys)[1]
    for wrong in ([("other", hashes)], [packed(keys[:1])], [(rank.engine.namespace, b"")], []):
        rank.worker.begin(StepOrders(1, 0, [], [move(wrong)]))
        assert rank.engine.keys(range(2 * CHUNK), ["salt"]) == keys
    rank.worker.close()


def run(rank: RankOfModel, orders: StepOrders) -> RankReport | None:
    rank.worker.begin(orders)
    rank.worker.start_load()
    for layer in range(LAYERS):
        rank.worker.wait_for_layer(f"layers.{layer}")
        rank.worker.save_layer(f"layers.{layer}")
    rank.worker.end()
    return rank.worker.report()


def test_a_look_up_does_not_wait_for_chunks_that_are_being_stored() -> None:
    rank = RankOfModel(0, 1, 16, 8, {})
    with held_completions(rank.engine):
        run(rank, StepOrders(1, 0, [], [move([])]))
        rank.worker.begin(StepOrders(2, 1, [move([])], []))
        rank.worker.look_up()
        assert rank.engine.stats()["pins"] == 0, "nothing is looked up before it is there"
    run(rank, StepOrders(2, 1, [move([])], []))
    assert rank.worker.invalid_blocks() == set()
    assert rank.engine.stats()["tokens_retrieved"] == 2 * CHUNK
    rank.worker.close()


def test_a_step_that_was_looked_up_and_never_ended_is_given_up_by_the_next() -> None:
    rank = RankOfModel(0, 1, 16, 8, {})
    run(rank, StepOrders(1, 0, [], [move([])]))
    assert rank.engine.flush()
    rank.worker.report()
    rank.worker.begin(StepOrders(2, 1, [move([])], []))
    rank.worker.look_up()
    assert rank.engine.stats()["pins"] > 0
    rank.worker.begin(StepOrders(3, 1, [], []))
    assert rank.engine.flush()
    require_rest(rank.engine)
    rank.worker.close()


def test_a_step_that_computes_nothing_stores_what_it_is_to_though_vllm_does_not_end_it() -> None:
    """vLLM 0.22 calls no `wait_for_save` then: the last chunk of an answer is stored in such a step."""
    rank = RankOfModel(0, 1, 16, 8, {})
    keys = chunk_keys(range(2 * CHUNK), CHUNK, rank.engine.namespace, ["salt"])
    rank.worker.begin(StepOrders(1, 0, [], [move([packed(keys)])], ended=("one",), is_empty=True))
    rank.worker.start_load(hooks_come=False)
    assert rank.worker.requests_ended() == {"one"}
    report = rank.worker.report()
    assert report is not None
    assert report.stored
    assert rank.engine.flush()
    assert rank.engine.lookup(np.arange(2 * CHUNK), salts=["salt"]) == 2 * CHUNK
    rank.worker.begin(StepOrders(2, 1, [], []))
    require_rest(rank.engine)
    rank.worker.close()


class FailingBlends:
    """Blending whose prompts do not arrive: their blocks have wrong contents, which others may share."""

    is_running = False

    def __init__(self, waits: bool) -> None:
        self._waits = waits

    def begin_step(self, blends: object, encodes: object, is_alone: bool) -> None:
        self._has_any = bool(blends)

    def blend(self, on_their_way: object) -> None: ...

    def invalid_blocks(self) -> set[int]:
        return {2} if self._has_any and not self._waits else set()

    def lost_blocks(self) -> set[int]:
        return {2} if self._has_any and self._waits else set()

    def close(self) -> None: ...

    def take_keys(self) -> tuple[list[object], list[object]]:
        return [], []


@pytest.mark.parametrize("asks", [True, False], ids=["vLLM asks for blocks", "vLLM does not ask"])
def test_nothing_that_was_computed_beside_a_blend_that_failed_is_stored(asks: bool) -> None:
    """Its exact prefix may be the one of another request, whose KV then rests on what never came."""
    rank = RankOfModel(0, 1, 16, 8, {})
    blending: Any = FailingBlends(waits=False)
    rank.worker._blending = blending
    order = BlendOrder(np.arange(8), (), np.arange(8), 0, 4, ())
    for step, acknowledged, blends in ((1, 0, [order]), (2, 0, []), (3, 1, [])):
        rank.worker.begin(StepOrders(step, acknowledged, [], [move([])], blends=blends))
        rank.worker.start_load()
        for layer in range(LAYERS):
            rank.worker.wait_for_layer(f"layers.{layer}")
            rank.worker.save_layer(f"layers.{layer}")
        if asks:
            assert rank.worker.invalid_blocks() == ({2} if blends else set())
        rank.worker.end()
        report = rank.worker.report()
        assert report is not None
        # The second step was ordered before the scheduler heard of it.
        assert (report.step, report.stored, bool(report.kept)) == (step, step == 3, step == 3)
    rank.worker.close()


def test_what_is_computed_beside_a_waiting_prompt_whose_blend_failed_is_stored() -> None:
    """Nobody has computed anything on its blocks."""
    rank = RankOfModel(0, 1, 16, 8, {})
    blending: Any = FailingBlends(waits=True)
    rank.worker._blending = blending
    order = BlendOrder(np.arange(8), (), np.arange(8), 0, 4, ())
    report = run(rank, StepOrders(1, 0, [], [move([])], blends=[order]))
    assert rank.worker.invalid_blocks() == {2}
    assert report is not None
    assert (report.step, report.stored, bool(report.kept)) == (1, True, True)
    rank.worker.close()


def test_the_scheduler_learns_for_how_many_chunks_there_is_room() -> None:
    rank = RankOfModel(0, 1, 16, 7, {})
    assert rank.worker.info.most_chunks == rank.engine.parts().storage.most_chunks == 7
    rank.worker.close()


def test_requests_that_have_ended_are_given_out_once_when_their_step_has_ended_or_was_given_up() -> None:
    rank = RankOfModel(0, 1, 16, 8, {})
    rank.worker.begin(StepOrders(1, 0, [], [move([])], ["a"]))
    assert rank.worker.requests_ended() == set(), "the blocks are still read"
    rank.worker.end()
    assert rank.worker.requests_ended() == {"a"}
    assert rank.worker.requests_ended() == set()
    rank.worker.begin(StepOrders(2, 1, ended=["b"]))
    rank.worker.begin(StepOrders(3, 1, ended=["c"]))
    assert rank.worker.requests_ended() == {"b"}
    rank.worker.end()
    assert rank.worker.requests_ended() == {"c"}
    rank.worker.close()


@pytest.mark.parametrize("is_locked", [True, False])
def test_the_scheduler_hears_of_a_rank_when_its_memory_is_locked_or_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_locked: bool
) -> None:
    rank = RankOfModel(0, 1, 16, 8, {})
    waited: list[float] = []
    monkeypatch.setattr(rank.engine, "wait_for_memory", lambda s: waited.append(s) or is_locked)
    assert rank.worker.introduce() is rank.worker.info
    assert waited == [MEMORY_S]
    assert ("requests are taken" in caplog.text) == (not is_locked)
    rank.worker.close()
