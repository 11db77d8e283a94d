"""Long random histories of requests: every answer is right, and nothing stays held."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integrations.vllm.scripted import CHUNK, LAYERS, VOCABULARY, Scripted, ScriptedRequest, expected


class History:
    """Requests that share prefixes at random, and what may happen to them."""

    def __init__(self, engine: Scripted, prefixes: int = 4) -> None:
        self.engine = engine
        self.random = engine.random
        self.prefixes = [[self.random.randrange(VOCABULARY) for _ in range(40)] for _ in range(prefixes)]
        self.requests: list[ScriptedRequest] = []

    def play(self, num_steps: int) -> None:
        """Let things happen for so many steps, then end: all answers are right, and nothing is held."""
        for _ in range(num_steps):
            self.happen()
            self.engine.step()
        self.engine.run()
        self.check()
        self.engine.at_rest()
        self.engine.close()

    def add(self) -> None:
        draw = self.random
        prefix = draw.choice(self.prefixes)[: draw.randrange(41)]
        tokens = prefix + [draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 20))]
        self.requests.append(ScriptedRequest(f"r{len(self.requests)}", tokens, draw.randrange(1, 12)))
        self.engine.add(self.requests[-1])

    def happen(self) -> None:
        """Something that may happen between two steps."""
        draw, engine = self.random, self.engine
        chance = draw.random()
        if chance < 0.3:
            self.add()
        elif chance < 0.34 and self.requests:
            engine.abort(draw.choice(self.requests))
        elif chance < 0.42:
            draw.choice(engine.ranks).fails_at = draw.randrange(LAYERS)
        elif chance < 0.47:
            host = draw.choice(engine.ranks).engine.parts().storage.host
            host.evict(draw.randrange(1, 1 + host.evictable()) if host.evictable() else 0)
        elif chance < 0.475:
            engine.scheduler.reset()
        elif chance < 0.55:
            engine.blocks.known.clear()

    def check(self) -> None:
        """Every answer so far is the beginning of what is computed without a cache."""
        for request in self.requests:
            answer = self.engine.answers.get(request.request_id, [])
            for number, token in enumerate(answer):
                before = [*request.prompt_token_ids, *answer[:number]]
                assert token == expected(before, self.engine.num_ranks), (request.request_id, number)


KINDS = {
    "one rank": {},
    "two ranks": {"num_ranks": 2},
    "whole graphs": {"whole_graphs": True, "own_cache": False, "save_decode_cache": True},
    "hooks that stay out": {"whole_graphs": True, "silent": 0.1, "own_cache": False},
    "no prefix cache of its own": {"own_cache": False},
    "few blocks": {"num_blocks": 30},
    "little host memory": {"host_chunks": 6},
    "small steps": {"budget": 5},
    "decoded tokens too": {"save_decode_cache": True},
    "rests too": {"save_unfull_chunk": True},
    "two ranks, few blocks, no prefix cache": {"num_ranks": 2, "num_blocks": 30, "own_cache": False},
    "ahead": {"ahead": True, "budget": 10},
    "asynchronous": {"samples_ahead": True, "budget": 10},
    "asynchronous, decoded tokens too": {"samples_ahead": True, "save_decode_cache": True},
    "asynchronous, decoded tokens too, two ranks": {
        "samples_ahead": True,
        "save_decode_cache": True,
        "num_ranks": 2,
        "num_blocks": 30,
    },
    "ahead, two ranks, no prefix cache": {"ahead": True, "num_ranks": 2, "own_cache": False, "budget": 10},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_right_whatever_happens_to_requests_chunks_and_loads(kind: str, seed: int) -> None:
    engine = Scripted(seed, **KINDS[kind])
    History(engine).play(250)


def test_nothing_is_stored_of_a_request_that_ran_on_blocks_that_were_not_loaded() -> None:
    """As in vLLM where requests share a prefix whose load failed, and the first gets few tokens a step."""
    engine = Scripted(5, most=7, budget=64, shares_failures=True, host_chunks=60, num_blocks=80)
    shared = list(range(300, 332))
    engine.add(ScriptedRequest("cached", shared, 1))
    engine.run()
    engine.blocks.known.clear()
    engine.ranks[0].fails_at = 1
    for name in ("computes again", "runs on"):
        engine.add(ScriptedRequest(name, [*shared, *map(ord, name), *range(400, 430)], 1))
    engine.run()
    assert engine.failed > 0
    (wrong,) = engine.answers["runs on"]
    engine.blocks.known.clear()
    tokens = [*shared, *map(ord, "runs on"), *range(400, 430)]
    engine.add(ScriptedRequest("again", tokens, 1))
    engine.run()
    assert engine.answers["again"] == [expected(tokens, 1)] != [wrong]
    engine.close()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**20), kind=st.sampled_from(sorted(KINDS)))
def test_short_histories_of_any_kind(seed: int, kind: str) -> None:
    engine = Scripted(seed, **KINDS[kind])
    History(engine, prefixes=1).play(30)


def test_requests_are_preempted_and_loads_come_and_fail_in_these_histories() -> None:
    engine = Scripted(0, num_blocks=22, budget=40, host_chunks=100)
    history = History(engine)

    def have_all_come() -> bool:
        return engine.preempted > 5 and engine.loaded >= 5 * CHUNK and engine.failed > 0

    # Chunks are stored in the background: how many steps it takes is the machine's.
    for _ in range(5000):
        history.happen()
        engine.step()
        if have_all_come():
            break
    assert have_all_come()
    engine.run()
    engine.close()


def test_what_is_computed_twice_is_loaded_the_second_time() -> None:
    engine = Scripted(1, own_cache=False)
    tokens = list(range(50))
    for name, hits in (("cold", 0), ("warm", 48)):
        engine.loaded = 0
        engine.add(ScriptedRequest(name, tokens, 3))
        engine.run()
        assert engine.loaded == hits
    assert engine.answers["cold"] == engine.answers["warm"]
    engine.close()


def test_a_load_waits_for_the_store_of_its_chunks_that_is_under_way() -> None:
    engine = Scripted(6, own_cache=False, budget=64)
    parts = engine.ranks[0].engine.parts()
    gate = threading.Event()
    put, wait_idle = parts.storage.batched_put, parts.completions.wait_idle

    def held(*arguments: Any) -> None:
        gate.wait()
        put(*arguments)

    def opens_the_gate(timeout_s: float) -> bool:
        gate.set()
        return wait_idle(timeout_s)

    parts.storage.batched_put = held  # type: ignore[method-assign]
    parts.completions.wait_idle = opens_the_gate  # type: ignore[method-assign]
    tokens = list(range(50))
    engine.add(ScriptedRequest("cold", tokens, 1))
    engine.run()
    assert len(parts.storage.host) == 0
    engine.add(ScriptedRequest("warm", tokens, 1))
    engine.run()
    assert gate.is_set()
    assert (engine.loaded, engine.failed) == (48, 0)
    assert engine.answers["cold"] == engine.answers["warm"]
    engine.close()


def test_chunks_that_could_not_be_loaded_are_offered_when_they_have_been_stored_anew() -> None:
    engine = Scripted(3, own_cache=False)
    tokens = list(range(30))
    index = engine.scheduler.index
    engine.add(ScriptedRequest("cold", tokens, 2))
    engine.run()
    engine.ranks[0].fails_at = 1
    engine.add(ScriptedRequest("warm", tokens, 2))
    keys = index.keys(np.array(tokens), ())
    assert index.prefix(keys) == 3
    engine.step()
    assert index.prefix(keys) == 0
    engine.run()
    assert index.prefix(keys) == 3
    engine.close()


def test_what_was_computed_beside_a_load_that_failed_is_stored_in_a_later_step() -> None:
    engine = Scripted(4, own_cache=False, budget=200, host_chunks=40)
    engine.add(ScriptedRequest("cached", list(range(24)), 1))
    engine.run()
    engine.ranks[0].fails_at = 0
    engine.add(ScriptedRequest("fails", list(range(30)), 2))
    engine.add(ScriptedRequest("beside", list(range(100, 150)), 4))
    engine.run()
    engine.loaded = 0
    engine.add(ScriptedRequest("again", list(range(100, 150)), 1))
    engine.run()
    assert engine.loaded == 48
    engine.close()


def test_a_rank_s_garbage_is_not_stored_by_the_others() -> None:
    """One rank's load fails; what the other computed beside it rests on that, and is not found later."""
    engine = Scripted(2, num_ranks=2, own_cache=False, budget=64)
    shared = list(range(100, 124))
    engine.add(ScriptedRequest("first", shared, 2))
    engine.run()
    engine.ranks[0].fails_at = 1
    longer = [*shared, *range(200, 217)]
    for name in ("fails", "after"):
        engine.add(ScriptedRequest(name, longer, 3))
        engine.run()
        assert engine.answers[name][0] == expected(longer, 2)
    assert engine.failed > 0
    assert engine.loaded >= 24 + 40
    engine.close()


def test_what_is_stored_after_a_reset_is_found_by_no_other_process() -> None:
    """Of two processes on one folder either may have got other weights with its reset."""
    engines = [Scripted(7), Scripted(7)]
    keys = []
    for engine in engines:
        engine.scheduler.reset()
        request = ScriptedRequest("after", list(range(CHUNK)), 1)
        tracked = engine.scheduler._requests.follow(request)
        keys += [tracked.chunks.keys(engine.scheduler.index, CHUNK)[0][0]]
        engine.close()
    assert len(set(keys)) == 2


@pytest.mark.parametrize("samples_ahead", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("answer", [5, 6, 7, 14])
def test_what_a_conversation_has_computed_is_found_in_its_next_turn(
    answer: int, num_ranks: int, samples_ahead: bool
) -> None:
    """With the last chunk that is full: its last token's id may be known only when the request has ended."""
    settings = {"save_decode_cache": True, "samples_ahead": samples_ahead}
    engine = Scripted(8, num_ranks, own_cache=False, budget=64, **settings)
    prompt = list(range(CHUNK + 3))
    engine.add(ScriptedRequest("turn 1", prompt, answer))
    engine.run()
    before = [*prompt, *engine.answers["turn 1"]]
    engine.add(ScriptedRequest("turn 2", [*before, 1, 2, 3], 1))
    engine.run()
    # The last token was sampled, and never computed.
    assert engine.loaded == (len(before) - 1) // CHUNK * CHUNK
    assert engine.answers["turn 2"] == [expected([*before, 1, 2, 3], num_ranks)]
    engine.at_rest()
    engine.close()


def test_an_answer_that_is_not_to_be_stored_keeps_no_block_after_its_end() -> None:
    engine = Scripted(9, own_cache=False, samples_ahead=True)
    engine.add(ScriptedRequest("request", list(range(CHUNK - 1)), 4))
    while engine.waiting or engine.running:
        engine.step()
    assert not engine.kept
    engine.close()


def test_blocks_are_kept_for_the_rest_of_an_answer_and_given_back_by_the_step_that_stores_it() -> None:
    engine = Scripted(9, own_cache=False, samples_ahead=True, save_decode_cache=True)
    engine.add(ScriptedRequest("request", list(range(CHUNK - 1)), 2))
    while engine.waiting or engine.running:
        engine.step()
    assert list(engine.kept) == ["request"]
    engine.run()
    assert not engine.kept
    assert len(engine.scheduler.index) == 1
    engine.close()


def test_blocks_that_were_kept_come_back_where_a_reset_leaves_nothing_to_store() -> None:
    engine = Scripted(9, own_cache=False, samples_ahead=True, save_decode_cache=True)
    engine.add(ScriptedRequest("request", list(range(CHUNK - 1)), 2))
    while engine.waiting or engine.running:
        engine.step()
    engine.scheduler.reset()
    engine.run()
    assert not engine.kept
    assert len(engine.scheduler.index) == 0
    engine.close()
