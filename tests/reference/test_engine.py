from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lwkv.errors import ConfigError, RequestError
from lwkv.reference import (
    LAYOUTS,
    Answer,
    Limits,
    Model,
    PagedCache,
    Prompt,
    ReferenceEngine,
    forward,
    generate,
)
from lwkv.reference.batch import Part, build_batch
from lwkv.reference.hooks import NoCache

MakeEngine = Callable[..., ReferenceEngine]


def _tokens(count: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + 7 * i * i + 3 * i) % 101 for i in range(count)]


def _greedy(model: Model, tokens: list[int], count: int) -> list[int]:
    """Continue tokens, all of them computed anew for each."""
    tokens, start = list(tokens), len(tokens)
    for _ in range(count):
        cache = PagedCache(model.shape, num_blocks=40, block_size=5, device=model.device)
        batch = build_batch([Part(tokens, 0, list(range(40)))], 5, model.device)
        tokens.append(int(forward(model, cache, batch, NoCache())[0].argmax()))
    return tokens[start:]


def _tokens_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decoding_from_the_cache_equals_computing_everything_anew(
    layout: str, make_engine: MakeEngine, model: Model
) -> None:
    answers = generate(make_engine(layout), [Prompt(_tokens(13), 9)])
    assert _tokens_of(answers) == [_greedy(model, _tokens(13), 9)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 6)), min_size=1, max_size=6),
    step_tokens=st.integers(1, 40),
    max_requests=st.integers(1, 4),
    num_blocks=st.integers(6, 20),
)
def test_a_request_is_answered_alike_however_it_is_batched_and_cut(
    sizes: list[tuple[int, int]],
    step_tokens: int,
    max_requests: int,
    num_blocks: int,
    make_engine: MakeEngine,
) -> None:
    prompts = [Prompt(_tokens(length, seed), new) for seed, (length, new) in enumerate(sizes)]
    alone = [generate(make_engine(), [prompt])[0].tokens for prompt in prompts]
    engine = make_engine(num_blocks=num_blocks, step_tokens=step_tokens, max_requests=max_requests)
    assert _tokens_of(generate(engine, prompts)) == alone
    assert engine.allocator.num_free == num_blocks
    assert not engine.has_work


def test_a_step_computes_no_more_than_its_tokens_and_requests(make_engine: MakeEngine) -> None:
    engine = make_engine(step_tokens=6, max_requests=2)
    for seed in range(3):
        engine.submit(Prompt(_tokens(8, seed), 2))
    answers: dict[int, Answer] = {}
    finished_at = {}
    for step in range(20):
        done = engine.step()
        finished_at |= dict.fromkeys(done, step)
        answers |= done
    # Request 0 takes 6, then 2 beside 4 of request 1; then one new token beside the rest of request 1.
    assert [answers[index].num_steps for index in range(3)] == [3, 3, 3]
    assert finished_at == {0: 2, 1: 3, 2: 5}
    assert engine.step() == {}


def test_an_answer_ends_with_a_stop_token(make_engine: MakeEngine) -> None:
    free = generate(make_engine(), [Prompt(_tokens(9), 12)])[0].tokens
    end = next(i for i in range(1, 12) if free[i] not in free[:i])
    stopped = generate(make_engine(), [Prompt(_tokens(9), 12, stop_tokens={free[end]})])[0]
    assert stopped.tokens == free[: end + 1]


def test_a_request_goes_on_from_tokens_in_its_own_blocks(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = generate(engine, [Prompt(_tokens(17), 1, keep_blocks=True)])[0]
    assert len(first.blocks) == 4
    assert engine.allocator.num_free == 56
    again = Prompt(_tokens(21), 5, num_local=17, local_blocks=first.blocks)
    answer = generate(engine, [again])[0]
    assert answer.tokens == generate(make_engine(), [Prompt(_tokens(21), 5)])[0].tokens
    assert (answer.num_local, answer.num_loaded, answer.num_computed) == (17, 0, 4)
    assert engine.allocator.num_free == 60


def test_an_answer_tells_times_and_counts(make_engine: MakeEngine) -> None:
    answer = generate(make_engine(step_tokens=4), [Prompt(_tokens(10), 3)])[0]
    assert (answer.num_prompt, answer.num_computed, answer.num_steps, answer.blocks) == (10, 10, 5, [])
    assert 0 < answer.first_token_s <= answer.total_s


def test_every_layers_phases_are_marked_in_order(make_engine: MakeEngine) -> None:
    marks: list[tuple[str, int]] = []
    engine = make_engine(mark=lambda phase, layer: marks.append((phase, layer)))
    generate(engine, [Prompt(_tokens(3), 1)])
    assert marks == [(phase, layer) for layer in range(3) for phase in ("start", "wait", "attend", "end")]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (Prompt([], 3), "got 0 tokens, max_new_tokens 3"),
        (Prompt([1], 0), "got 1 tokens, max_new_tokens 0"),
        (Prompt([1] * 150, 11), "take 161 tokens; the model's longest request is 160"),
        (Prompt([1] * 30, 11), r"30 \+ 11 tokens need 9 blocks, the cache has 8"),
        (Prompt([1] * 9, 1, num_local=9, local_blocks=[0, 1]), "num_local is 9; .* allow 0 to 8"),
        (Prompt([1] * 9, 1, num_local=6, local_blocks=[0]), "num_local is 6; .* allow 0 to 5"),
    ],
)
def test_a_request_that_could_never_run_is_refused(
    prompt: Prompt, message: str, make_engine: MakeEngine
) -> None:
    engine = make_engine(num_blocks=8)
    with pytest.raises(RequestError, match=message):
        engine.submit(prompt)
    assert not engine.has_work


def test_a_cache_of_another_dtype_is_refused(model: Model, device: torch.device) -> None:
    cache = PagedCache(model.shape, num_blocks=2, dtype=torch.bfloat16, device=device)
    with pytest.raises(ConfigError, match=r"the cache is torch.bfloat16 .* the model needs torch.float32"):
        ReferenceEngine(model, cache)


def test_limits_under_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="step_tokens must be at least 1, got 0"):
        Limits(step_tokens=0)
