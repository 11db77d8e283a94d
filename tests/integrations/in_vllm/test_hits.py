"""Answers with lwkv are those without, and the tokens did come from lwkv."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import BLOCK, CHUNK, Engine, assert_same, prompt, started, with_lwkv


@pytest.fixture(scope="module")
def shared(llama: Path) -> Iterator[Engine]:
    """Without vLLM's prefix cache: what is not computed can only come from lwkv."""
    with started(llama, enable_prefix_caching=False, **with_lwkv()) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    shared.new_hits()
    yield shared
    shared.at_rest()


def test_the_first_answer_is_computed_and_the_second_loaded(engine: Engine, plain: Elsewhere) -> None:
    prompts = [prompt(1, 700)]
    assert_same(engine.ask(prompts), plain.ask(prompts))
    assert engine.new_hits() == 0
    for _ in range(2):
        (answer,) = warm = engine.ask(prompts)
        assert_same(warm, plain.ask(prompts))
        assert engine.new_hits() == answer.cached == 640


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK + BLOCK])
def test_a_prompt_that_is_cached_as_a_whole_leaves_one_block_to_compute(
    engine: Engine, plain: Elsewhere, length: int
) -> None:
    prompts = [prompt(10 + length, length)]
    engine.ask(prompts)
    engine.new_hits()
    assert_same(engine.ask(prompts), plain.ask(prompts))
    chunks = length // CHUNK * CHUNK
    assert engine.new_hits() == min(chunks, (length - 1) // BLOCK * BLOCK)


def test_hits_partial_hits_misses_and_shared_prefixes_in_one_batch(engine: Engine, plain: Elsewhere) -> None:
    engine.ask([prompt(20, 400)])
    engine.new_hits()
    prompts = [
        prompt(20, 400),
        prompt(20, 300) + prompt(21, 200),
        prompt(22, 350),
        prompt(20, 128) + prompt(23, 64),
        prompt(22, 350)[:200] + prompt(24, 100),
    ]
    answers = engine.ask(prompts)
    assert_same(answers, plain.ask(prompts))
    assert [answer.cached for answer in answers] == [384, 256, 0, 128, 0]
    assert engine.new_hits() == 384 + 256 + 128


def test_each_turn_of_a_conversation_loads_what_the_turns_before_computed(
    engine: Engine, plain: Elsewhere
) -> None:
    turn = prompt(30, 100)
    for number in range(4):
        answers = engine.ask([turn], max_tokens=16)
        assert_same(answers, plain.ask([turn], 16))
        assert engine.new_hits() == (len(turn) - 116) // CHUNK * CHUNK if number else True
        turn = turn + answers[0].tokens + prompt(31 + number, 100)


def test_a_cache_salt_keeps_prompts_apart(engine: Engine, plain: Elsewhere) -> None:
    prompts = [prompt(40, 200)]
    engine.ask(prompts, salt="one")
    engine.new_hits()
    for salt, hits in (("two", 0), (None, 0), ("one", 192), ("two", 192)):
        assert_same(engine.ask(prompts, salt=salt), plain.ask(prompts))
        assert engine.new_hits() == hits


def test_a_request_that_is_aborted_leaves_nothing_held(engine: Engine, plain: Elsewhere) -> None:
    engine.ask([prompt(50, 300)])
    engine.new_hits()
    engine.abort(prompt(50, 300), after_steps=0)
    engine.abort(prompt(50, 300), after_steps=1)
    engine.abort(prompt(51, 300), after_steps=1)
    engine.at_rest()
    prompts = [prompt(50, 300), prompt(51, 300)]
    assert_same(engine.ask(prompts), plain.ask(prompts))
