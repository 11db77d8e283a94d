"""Beside vLLM's own prefix cache: what it has is not loaded, the rest comes from lwkv."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from integrations.in_vllm.reference import Elsewhere, assert_forgotten_by_a_reset
from integrations.in_vllm.rig import CHUNK, Engine, assert_same, prompt, started, with_lwkv


@pytest.fixture(scope="module")
def shared(llama: Path) -> Iterator[Engine]:
    with started(llama, enable_prefix_caching=True, **with_lwkv()) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    shared.forget()
    shared.new_hits()
    yield shared
    shared.at_rest()


@pytest.mark.parametrize("own", [32, CHUNK, 160, 384, 608])
def test_lwkv_gives_what_vllm_lacks_also_from_within_a_chunk(
    engine: Engine, plain: Elsewhere, own: int
) -> None:
    """vLLM has the first `own` tokens, lwkv 640, and 60 are in neither."""
    ids = prompt(100, 700)
    engine.ask([ids])
    engine.forget()
    # The prefix, and one token behind it that no prompt has.
    engine.ask([[*ids[:own], 501]])
    engine.new_hits()
    (answer,) = answers = engine.ask([ids])
    assert_same(answers, plain.ask([ids]))
    assert (answer.cached, engine.new_hits()) == (640, 640 - own)


def test_nothing_is_loaded_where_vllm_has_as_much(engine: Engine, plain: Elsewhere) -> None:
    ids = prompt(110, 300)
    engine.ask([ids])
    engine.new_hits()
    (answer,) = answers = engine.ask([ids])
    assert_same(answers, plain.ask([ids]))
    assert (answer.cached, engine.new_hits()) == (288, 0)


def test_what_only_vllm_has_cached_is_stored_when_it_is_used(engine: Engine, plain: Elsewhere) -> None:
    ids = prompt(120, 300)
    engine.ask([ids])
    engine.evict_all()
    engine.ask([prompt(121, 20)])  # the scheduler hears of it with the next step
    engine.ask([ids])
    engine.forget()
    engine.new_hits()
    assert_same(engine.ask([ids]), plain.ask([ids]))
    assert engine.new_hits() == 256


def test_requests_of_a_batch_share_one_load_of_their_prefix(engine: Engine, plain: Elsewhere) -> None:
    engine.ask([prompt(130, 400)])
    engine.forget()
    engine.new_hits()
    prompts = [prompt(130, 384) + prompt(131 + i, 40 * i) for i in range(1, 4)]
    answers = engine.ask([*prompts, prompt(140, 350)])
    assert_same(answers, plain.ask([*prompts, prompt(140, 350)]))
    assert engine.new_hits() == 384
    assert [answer.cached for answer in answers] == [384, 384, 384, 0]


def test_a_reset_of_the_connector_finds_nothing_that_was_stored_before(
    engine: Engine, plain: Elsewhere
) -> None:
    assert_forgotten_by_a_reset(engine, plain, prompt(150, 300))
