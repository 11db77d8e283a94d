"""What the engine asks of a KV cache, in which order, and what it does when a load fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lwkv.reference import LAYOUTS, Answer, NoCache, Prompt, ReferenceEngine, generate
from lwkv.request import Request

MakeEngine = Callable[..., ReferenceEngine]


def _tokens(count: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + 7 * i * i + 3 * i) % 101 for i in range(count)]


def _serve(make_engine: MakeEngine, notebook: Any, *prompts: Prompt, **options: Any) -> list[Answer]:
    engine = make_engine(steps=notebook, lookup=notebook.lookup, **options)
    return generate(notebook.attach(engine), list(prompts))


def _counts(answer: Answer) -> tuple[int, int, int]:
    return answer.num_loaded, answer.num_computed, answer.num_failed_loads


def test_the_hooks_are_called_in_vllms_order(make_engine: MakeEngine, notebook: Any) -> None:
    _serve(make_engine, notebook, Prompt(_tokens(9), 2))
    layers = ["wait 0", "save 0", "wait 1", "save 1", "wait 2", "save 2"]
    assert notebook.calls == ["begin 0 1", "start", *layers, "end", "begin 0 0", "start", *layers, "end"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loaded_prefix_gives_the_answer_of_a_computed_one(
    layout: str, make_engine: MakeEngine, notebook: Any
) -> None:
    cold = _serve(make_engine, notebook, Prompt(_tokens(20), 6), layout=layout)[0]
    warm = _serve(make_engine, notebook, Prompt(_tokens(20) + _tokens(4, 1), 6), layout=layout)[0]
    plain = generate(make_engine(layout), [Prompt(_tokens(20), 6), Prompt(_tokens(20) + _tokens(4, 1), 6)])
    assert [cold.tokens, warm.tokens] == [answer.tokens for answer in plain]
    assert (_counts(cold), _counts(warm)) == ((0, 20, 0), (20, 4, 0))


def test_of_a_fully_cached_prompt_the_last_token_is_computed(make_engine: MakeEngine, notebook: Any) -> None:
    cold, warm = (_serve(make_engine, notebook, Prompt(_tokens(16), 4))[0] for _ in range(2))
    assert warm.tokens == cold.tokens
    assert _counts(warm) == (15, 1, 0)
    # The whole chunk is asked for, by all its tokens, but there is no slot for the last one.
    load = notebook.load_log[0]
    assert (len(load.tokens), load.slot_mapping.tolist().count(-1), int(load.slot_mapping[-1])) == (16, 1, -1)


def test_a_load_leaves_out_what_the_engine_has(make_engine: MakeEngine, notebook: Any) -> None:
    engine = make_engine(steps=notebook, lookup=notebook.lookup)
    notebook.attach(engine)
    first = generate(engine, [Prompt(_tokens(20), 1, keep_blocks=True)])[0]
    again = Prompt(_tokens(22), 5, num_local=11, local_blocks=first.blocks[:3])
    answer = generate(engine, [again])[0]
    assert answer.tokens == generate(make_engine(), [Prompt(_tokens(22), 5)])[0].tokens
    assert (answer.num_local, *_counts(answer)) == (11, 9, 2, 0)
    assert notebook.load_log[0].mask.tolist() == [False] * 11 + [True] * 9


def test_local_tokens_beyond_the_hit_need_no_load(make_engine: MakeEngine, notebook: Any) -> None:
    engine = make_engine(steps=notebook, lookup=notebook.lookup)
    first = generate(notebook.attach(engine), [Prompt(_tokens(10), 2, keep_blocks=True)])[0]
    generate(engine, [Prompt([*_tokens(10), *first.tokens], 1, num_local=11, local_blocks=first.blocks)])
    assert (notebook.load_log, len(notebook.store_log)) == ([], 2)


@pytest.mark.parametrize("lost", [{0}, {6}, {11, 3}, set(range(20))])
def test_a_failed_load_is_recomputed_from_the_first_missing_token(
    lost: set[int], make_engine: MakeEngine, notebook: Any
) -> None:
    _serve(make_engine, notebook, Prompt(_tokens(20), 1), Prompt(_tokens(17, 2), 1))
    notebook.lost = lost
    prompts = [Prompt(_tokens(24), 6), Prompt(_tokens(9, 1), 6)]
    failed, bystander = _serve(make_engine, notebook, *prompts)
    plain = generate(make_engine(), prompts)
    assert [failed.tokens, bystander.tokens] == [answer.tokens for answer in plain]
    assert _counts(failed) == (min(lost), 4 + 24 - min(lost), 1)
    assert _counts(bystander) == (0, 9, 0)
    # One step is lost, and the load that failed is not asked for again.
    assert (failed.num_steps, len(notebook.load_log)) == (plain[0].num_steps + 1, 1)


def test_after_a_failed_load_all_that_is_recomputed_is_offered_again(
    make_engine: MakeEngine, notebook: Any
) -> None:
    _serve(make_engine, notebook, Prompt(_tokens(20), 1))
    notebook.lost = {13}
    notebook.store_log.clear()
    _serve(make_engine, notebook, Prompt(_tokens(24), 2))
    assert [(len(s.tokens), int(s.mask.sum())) for s in notebook.store_log] == [(24, 8), (24, 16)]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    lost=st.sets(st.integers(0, 23)),
    step_tokens=st.integers(1, 30),
)
def test_whatever_fails_the_answers_are_those_of_an_engine_without_cache(
    lengths: list[int], lost: set[int], step_tokens: int, make_engine: MakeEngine, notebook: Any
) -> None:
    notebook.lost, notebook.known = set(), {}
    _serve(make_engine, notebook, Prompt(_tokens(24), 1), Prompt(_tokens(13, 1), 1))
    notebook.lost = lost
    prompts = [Prompt(_tokens(length, seed % 2), 3) for seed, length in enumerate(lengths)]
    answers = _serve(make_engine, notebook, *prompts, step_tokens=step_tokens, num_blocks=14)
    plain = generate(make_engine(), prompts)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]


def test_whole_chunks_are_offered_as_they_fill_and_the_rest_with_the_prompts_end(
    make_engine: MakeEngine, notebook: Any
) -> None:
    _serve(make_engine, notebook, Prompt(_tokens(27), 9), step_tokens=6)
    offered = [(len(store.tokens), store.mask.tolist().index(True)) for store in notebook.store_log]
    assert offered == [(8, 0), (16, 8), (24, 16), (27, 24)]


def test_generated_tokens_are_offered_only_if_asked_for(make_engine: MakeEngine, notebook: Any) -> None:
    answer = _serve(make_engine, notebook, Prompt(_tokens(5), 14), store_decode=True)[0]
    assert [len(store.tokens) for store in notebook.store_log] == [5, 8, 16]
    assert notebook.store_log[-1].tokens.tolist() == _tokens(5) + answer.tokens[:11]
    assert notebook.store_log[-1].mask.tolist() == [False] * 8 + [True] * 8


def test_what_was_loaded_is_not_offered_again(make_engine: MakeEngine, notebook: Any) -> None:
    _serve(make_engine, notebook, Prompt(_tokens(16), 1))
    _serve(make_engine, notebook, Prompt(_tokens(21), 1))
    assert notebook.store_log[-1].mask.tolist() == [False] * 16 + [True] * 5


def test_slots_follow_the_requests_blocks(make_engine: MakeEngine, notebook: Any) -> None:
    engine = make_engine(steps=notebook, lookup=notebook.lookup)
    engine.allocator.take(2)
    engine.allocator.free([0])
    generate(notebook.attach(engine), [Prompt(_tokens(7), 1)])
    assert notebook.store_log[0].slot_mapping.tolist() == [0, 1, 2, 3, 4, 10, 11]


def test_salts_reach_the_look_up_and_the_cache(make_engine: MakeEngine, notebook: Any) -> None:
    _serve(make_engine, notebook, Prompt(_tokens(16), 1, salts=("tenant", "adapter")))
    other = _serve(make_engine, notebook, Prompt(_tokens(16), 1, salts=("tenant",)))[0]
    same = _serve(make_engine, notebook, Prompt(_tokens(16), 1, salts=("tenant", "adapter")))[0]
    assert (other.num_loaded, same.num_loaded) == (0, 15)
    assert notebook.load_log[0].salts == ("tenant", "adapter")


def test_without_a_cache_nothing_is_loaded() -> None:
    steps = NoCache()
    load = Request(torch.arange(3), torch.arange(3))
    steps.begin([load], [])
    assert steps.start_load_kv() == [0]
    assert [mask.tolist() for mask in steps.wait_for_save().loaded] == [[False] * 3]


def test_an_engine_that_is_promised_what_never_comes_computes_it(make_engine: MakeEngine) -> None:
    answer = generate(make_engine(lookup=lambda tokens, salts: 8), [Prompt(_tokens(12), 3)])[0]
    assert answer.tokens == generate(make_engine(), [Prompt(_tokens(12), 3)])[0].tokens
    assert _counts(answer) == (0, 16, 1)
