"""Two engines of vLLM on one host memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from integrations.in_vllm import models
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import CHUNK, assert_same, prompt, with_lwkv
from integrations.in_vllm.test_soak import PrefixOracle
from shared_host.owners import owner_at
from shared_host.workers import wait_for

PROMPTS = [prompt(400, 300), prompt(401, 200)]
LAYERS, ROOM = 4, 8
"""Chunks that the owner has room for."""


def test_what_one_engine_stores_is_a_hit_of_the_other_and_of_one_that_starts_when_it_was_killed(
    llama: Path, plain: Elsewhere, tmp_path: Path
) -> None:
    path = tmp_path / "host.sock"
    settings = with_lwkv(host_memory=str(path), extra_config={"host_memory_timeout_s": 30.0})
    with owner_at(path, 2048, stride=32768) as owner:
        first = Elsewhere(llama, enable_prefix_caching=False, **settings)
        second = Elsewhere(llama, enable_prefix_caching=False, **settings)
        try:
            assert_same(second.ask([prompt(402, 100)]), plain.ask([prompt(402, 100)]))
            assert_same(first.ask(PROMPTS), plain.ask(PROMPTS))
            answers = second.ask(PROMPTS)
            assert_same(answers, plain.ask(PROMPTS))
            assert [answer.cached for answer in answers] == [256, 192]
            first.kill()
            assert owner.server.status()["chunks"] == 1 + 4 + 3
            third = Elsewhere(llama, enable_prefix_caching=False, **settings)
            answers = third.ask(PROMPTS)
            assert_same(answers, plain.ask(PROMPTS))
            assert [answer.cached for answer in answers] == [256, 192]
            third.close()
        finally:
            first.kill()
            second.close()


def test_two_engines_with_less_memory_than_a_prompt_find_what_it_has_room_for(
    llama: Path, plain: Elsewhere, tmp_path: Path
) -> None:
    path = tmp_path / "host.sock"
    settings = with_lwkv(host_memory=str(path), extra_config={"host_memory_timeout_s": 30.0})
    with owner_at(path, ROOM * LAYERS, stride=32768) as owner:
        engines = [Elsewhere(llama, enable_prefix_caching=False, **settings) for _ in range(2)]
        try:
            require_hits_of_the_room(engines, plain)
            assert owner.server.status()["chunks"] == ROOM
            require_no_load_to_fail_though_both_store(engines, plain)
            wait_for(lambda: owner.server.status()["pages_held"] == 0)
            assert owner.server.status()["chunks_promised"] == 0
        finally:
            for engine in engines:
                engine.close()


def turns_of(number: int) -> list[list[int]]:
    """Turns of a conversation that begins as others do; the last one has more chunks than the owner room."""
    return [prompt(403, 100) + prompt(404 + number, 200 * turn) for turn in (1, 2, 3)]


def require_hits_of_the_room(engines: Sequence[Elsewhere], plain: Elsewhere) -> None:
    """Conversations, each turn asked of either engine, find what a cache of the owner's room finds.

    Nothing that was promised is lost, and no more is moved than is found, and than is new.
    """
    oracle, random, found, wanted = PrefixOracle(ROOM, CHUNK), Random(18), 0, 0
    turns = [turn for both in zip(turns_of(0), turns_of(1), strict=True) for turn in both]
    for ids in [*turns, *random.sample(turns, len(turns))]:
        engine = random.choice(engines)
        loaded, stored = engine.call("moved")
        (answer,) = asked = engine.call("ask", [ids])
        assert_same(asked, plain.ask([ids]))
        assert engine.call("flush")
        found += answer.cached
        wanted += min(oracle.ask(ids), (len(ids) - 1) // CHUNK * CHUNK)
        moved = engine.call("moved")
        assert moved[0] - loaded == answer.cached
        assert moved[1] - stored <= len(ids) // CHUNK * CHUNK - answer.cached
    assert found >= wanted > 0
    assert [engine.call("recomputed") for engine in engines] == [0, 0]


def require_no_load_to_fail_though_both_store(engines: Sequence[Elsewhere], plain: Elsewhere) -> None:
    """Each engine evicts what the other has just found, at any time."""
    turns = [turn for number in range(4) for turn in turns_of(number)]
    wanted = plain.ask(turns)

    def converse(engine: Elsewhere, seed: int) -> int:
        cached = 0
        for number in Random(seed).choices(range(len(turns)), k=24):
            (answer,) = engine.call("ask", [turns[number]])
            assert_same([answer], [wanted[number]])
            cached += answer.cached
        return cached

    with ThreadPoolExecutor(2) as threads:
        cached = list(threads.map(converse, engines, (1, 2)))
    assert min(cached) > 0
    assert [engine.call("recomputed") for engine in engines] == [0, 0]


def test_two_ranks_of_a_model_with_latent_rows_keep_them_once_and_both_load_them(tmp_path: Path) -> None:
    """Of rows that are wrong at one rank the answers would be wrong: each has half of the heads."""
    model = models.written(models.write_deepseek, tmp_path)
    arguments = {"block_size": 16, "compilation_config": {"custom_ops": ["none"]}}
    ranks = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
    path = tmp_path / "host.sock"
    settings = with_lwkv(host_memory=str(path), extra_config={"host_memory_timeout_s": 30.0})
    plain = Elsewhere(model, enable_prefix_caching=False, **arguments)
    wanted = plain.ask(PROMPTS)
    plain.close()
    with owner_at(path, 64, stride=64 * 576 * 4) as owner:
        for hits in ([0, 0], [256, 192]):
            engine = Elsewhere(model, enable_prefix_caching=False, **arguments, **ranks, **settings)
            try:
                answers = engine.ask(PROMPTS)
                assert_same(answers, wanted)
                assert [answer.cached for answer in answers] == hits
            finally:
                engine.close()
            status = owner.server.status()
            assert (status["chunks"], status["pages_in_use"]) == (4 + 3, (4 + 3) * 4)
