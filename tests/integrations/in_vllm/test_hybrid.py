"""Models whose layers keep different things: what is loaded gives the answers of what is computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm
from integrations.in_vllm import models
from integrations.in_vllm.reference import Elsewhere, assert_forgotten_by_a_reset
from integrations.in_vllm.rig import CHUNK, Engine, assert_same, prompt, started, with_lwkv

from lwkv.integrations.vllm.hybrid.refusals import can_have_groups

pytestmark = pytest.mark.skipif(
    not can_have_groups(vllm.__version__), reason="before 0.32, vLLM has all layers in one group here"
)

WINDOW = 64


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers with a window and two without: three groups of two."""
    return models.written(models.write_gemma, tmp_path_factory.mktemp("gemma"), WINDOW, "wwf" * 2)


@pytest.fixture(scope="module")
def computed(gemma: Path) -> Iterator[Elsewhere]:
    engine = Elsewhere(gemma, enable_prefix_caching=False)
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "with vLLM's prefix cache"])
def shared(gemma: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with started(gemma, enable_prefix_caching=request.param, **with_lwkv()) as engine:
        assert len(engine.core.scheduler.kv_cache_config.kv_cache_groups) == 3
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    shared.forget()
    shared.new_hits()
    yield shared
    shared.groups_at_rest()


def test_the_first_answer_is_computed_and_the_second_loaded(engine: Engine, computed: Elsewhere) -> None:
    prompts = [prompt(2000, 700)]
    assert_same(engine.ask(prompts), computed.ask(prompts))
    assert engine.new_hits() == 0
    for _ in range(2):
        engine.forget()
        (answer,) = warm = engine.ask(prompts)
        assert_same(warm, computed.ask(prompts))
        assert engine.new_hits() == answer.cached == 640


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK + 32])
def test_a_prompt_that_is_cached_as_a_whole_leaves_some_to_compute(
    engine: Engine, computed: Elsewhere, length: int
) -> None:
    prompts = [prompt(2010 + length, length)]
    engine.ask(prompts)
    engine.forget()
    engine.new_hits()
    assert_same(engine.ask(prompts), computed.ask(prompts))
    assert engine.new_hits() == (length - 1) // CHUNK * CHUNK


def test_each_turn_of_a_conversation_loads_what_the_turns_before_computed(
    engine: Engine, computed: Elsewhere
) -> None:
    turn = prompt(2030, 100)
    for number in range(4):
        answers = engine.ask([turn], max_tokens=16)
        assert_same(answers, computed.ask([turn], 16))
        assert engine.new_hits() == ((len(turn) - 116) // CHUNK * CHUNK if number else 0)
        engine.forget()
        turn = turn + answers[0].tokens + prompt(2031 + number, 100)


def test_a_prompt_that_parts_from_another_is_found_there_from_the_second_time_on(
    engine: Engine, computed: Elsewhere
) -> None:
    begin = prompt(2050, 300)
    for number, hits in enumerate([0, 0, 256, 256]):
        prompts = [begin + prompt(2051 + number, 100)]
        assert_same(engine.ask(prompts), computed.ask(prompts))
        assert engine.new_hits() == hits
        engine.forget()


def test_hits_misses_and_shared_prefixes_in_one_batch(engine: Engine, computed: Elsewhere) -> None:
    engine.ask([prompt(2060, 400), prompt(2060, 300)])
    engine.forget()
    engine.new_hits()
    prompts = [
        prompt(2060, 400),
        prompt(2060, 300) + prompt(2061, 200),
        prompt(2062, 350),
        prompt(2060, 128) + prompt(2063, 64),
        prompt(2062, 350)[:200] + prompt(2064, 100),
    ]
    assert_same(engine.ask(prompts), computed.ask(prompts))
    assert engine.new_hits() > 0


@pytest.mark.parametrize("own", [32, CHUNK, 160, 384, 608])
def test_lwkv_gives_what_vllm_lacks(engine: Engine, computed: Elsewhere, own: int) -> None:
    """vLLM has the first `own` tokens, if it has a cache, and lwkv 640."""
    ids = prompt(2100, 700)
    engine.ask([ids])
    engine.forget()
    engine.ask([[*ids[:own], 501]])
    engine.new_hits()
    (answer,) = answers = engine.ask([ids])
    assert_same(answers, computed.ask([ids]))
    assert answer.cached == 640


def test_a_request_that_is_aborted_leaves_nothing_held(engine: Engine, computed: Elsewhere) -> None:
    engine.ask([prompt(2150, 300)])
    engine.forget()
    for steps in range(4):
        engine.abort(prompt(2150, 300), after_steps=steps)
    engine.abort(prompt(2151, 300), after_steps=1)
    engine.groups_at_rest()
    prompts = [prompt(2150, 300), prompt(2151, 300)]
    assert_same(engine.ask(prompts), computed.ask(prompts))


def test_a_reset_of_the_connector_finds_nothing_that_was_stored_before(
    engine: Engine, computed: Elsewhere
) -> None:
    assert_forgotten_by_a_reset(engine, computed, prompt(2160, 300))
