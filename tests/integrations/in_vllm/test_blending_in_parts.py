"""Blends beside requests that decode: steps do a part of them each, and all go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import CHUNK, Answer, Engine, assert_same, prompt, started
from integrations.in_vllm.test_blending import (
    Documents,
    ask,
    blending,
    blends_at_rest,
    choose,
    compute_again,
    count,
    documents,
    encode,
    settle,
)

from lwkv.blend import Deviation, FirstTokens, NoTokens, QueryAttention, Selector

DECODED = 24


@pytest.fixture(scope="module")
def shared(llama: Path) -> Iterator[Engine]:
    settings = blending(blend_selector="query", blend_recompute_ratios=1.0) | {"max_num_batched_tokens": 1024}
    with started(llama, enable_prefix_caching=True, **settings) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    compute_again(shared, 1.0)
    yield shared
    blends_at_rest(shared)
    assert not shared.scheduler.blending.is_under_way
    assert not shared.worker._blending._unfinished


class Beside:
    """Requests that decode, one token a step, and what comes beside them."""

    def __init__(self, engine: Engine, seed: int, number: int = 3) -> None:
        self.core, self.engine = engine.llm.llm_engine, engine
        self.prompts = [prompt(seed + one, 40) for one in range(number)]
        self.found: dict[str, Any] = {}
        self.num_tokens: list[dict[str, int]] = []
        for number, ids in enumerate(self.prompts):
            self.add(f"decodes-{number}", ids, DECODED)
        for _ in range(3):
            self.step()

    def add(self, name: str, ids: Sequence[int], max_tokens: int, extra: Any = None) -> None:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            logprobs=1,
            ignore_eos=True,
            detokenize=False,
            extra_args=extra,
        )
        self.core.add_request(name, {"prompt_token_ids": list(ids)}, parameters)

    def blend(self, name: str, asked: Documents, max_tokens: int = 8) -> None:
        self.add(name, asked.ids, max_tokens, {"kv_transfer_params": {"lwkv_segments": asked.segments}})

    def step(self) -> None:
        for output in self.core.step():
            self.found[output.request_id] = output
        self.num_tokens.append({name: len(one.outputs[0].token_ids) for name, one in self.found.items()})

    def finish(self) -> None:
        while self.core.has_unfinished_requests():
            self.step()

    def answers(self, *names: str) -> list[Answer]:
        from integrations.in_vllm.rig import _answer

        return [_answer(self.found[name]) for name in names]

    def others(self) -> list[Answer]:
        return self.answers(*(f"decodes-{number}" for number in range(len(self.prompts))))


def cached(engine: Engine, seed: int, *lengths: int) -> Documents:
    parts = documents(seed, *lengths)
    encode(engine, parts)
    engine.forget()
    return Documents(parts[::-1], prompt(seed + 1, 30))


def test_requests_that_decode_get_a_token_in_every_step_and_none_does_all_of_a_blend(
    engine: Engine, plain: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = cached(engine, 401, 90, 104, 71)
    layers = engine.worker._blending._layers
    run, rows = layers.run, list[int]()

    def counted(layer: int, calls: Any, states: Any) -> Any:
        rows.append(layer)
        return run(layer, calls, states)

    monkeypatch.setattr(layers, "run", counted)
    beside = Beside(engine, 410)
    beside.blend("blend", asked)
    layers_of_steps = []
    while "blend" not in beside.found:
        rows.clear()
        beside.step()
        layers_of_steps.append(len(rows))
    beside.finish()
    assert sum(layers_of_steps) == layers.num_layers
    assert max(layers_of_steps) <= 2
    for before, after in zip(beside.num_tokens[2:], beside.num_tokens[3:], strict=False):
        for name in ("decodes-0", "decodes-1", "decodes-2"):
            assert after[name] == min(before[name] + 1, DECODED)
    assert_same(beside.answers("blend"), plain.ask([asked.ids]))
    assert_same(beside.others(), plain.ask(beside.prompts, DECODED))


@pytest.mark.parametrize(
    "selector", [NoTokens(), FirstTokens(), QueryAttention.of(4), Deviation("k", (1, 3), (0.5, 0.2))]
)
def test_a_blend_beside_others_is_what_it_is_alone(
    engine: Engine, plain: Elsewhere, selector: Selector, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else tokens in front of the question, which is computed with them, may come with it.
    monkeypatch.setattr(engine.worker._blending._layers, "most_gap", 0)
    asked = cached(engine, 420, 90, 64, 71)
    choose(engine, selector, 0.0 if isinstance(selector, NoTokens) else 0.2)
    counts = [count(engine, "tokens_chosen")]
    alone = ask(engine, [asked])
    engine.forget()
    counts.append(count(engine, "tokens_chosen"))
    missing = count(engine, "questions_missing")
    beside = Beside(engine, 430)
    beside.blend("blend", asked)
    beside.finish()
    assert_same(beside.answers("blend"), alone)
    assert_same(beside.others(), plain.ask(beside.prompts, DECODED))
    counts.append(count(engine, "tokens_chosen"))
    assert counts[2] - counts[1] == counts[1] - counts[0]
    assert count(engine, "questions_missing") == missing


def test_several_blends_beside_others_come_one_by_one(engine: Engine, plain: Elsewhere) -> None:
    first, second = cached(engine, 440, 90, 64), cached(engine, 445, 70, 81, 50)
    requests = count(engine, "requests")
    beside = Beside(engine, 450)
    for name, one in (("one", first), ("two", second), ("three", first)):
        beside.blend(name, one)
    beside.finish()
    assert_same(beside.answers("one", "two", "three"), plain.ask([one.ids for one in (first, second, first)]))
    assert_same(beside.others(), plain.ask(beside.prompts, DECODED))
    assert count(engine, "requests") - requests == 3


@pytest.mark.parametrize("steps", range(1, 8))
def test_a_blend_that_is_aborted_leaves_nothing(engine: Engine, plain: Elsewhere, steps: int) -> None:
    asked = cached(engine, 460, 90, 64)
    beside = Beside(engine, 470)
    beside.blend("aborted", asked)
    for _ in range(steps):
        beside.step()
    beside.core.abort_request(["aborted"])
    beside.blend("blend", asked)
    beside.finish()
    assert_same(beside.answers("blend"), plain.ask([asked.ids]))
    assert_same(beside.others(), plain.ask(beside.prompts, DECODED))


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_one_behind_an_exact_prefix_that_is_aborted_has_nothing_stored_of_it(
    engine: Engine, plain: Elsewhere, steps: int
) -> None:
    """Its blocks may have nothing of the prefix yet, which others find in lwkv."""
    parts, head = documents(540, 90, 64), prompt(541, 3 * CHUNK)
    encode(engine, parts)
    engine.ask([[*head, 501]])
    settle(engine)
    engine.forget()
    asked = Documents(parts[::-1], prompt(542, 30), head)
    beside = Beside(engine, 550)
    beside.blend("aborted", asked)
    for step in range(steps):
        beside.step()
        if step == 0:
            host = engine.worker.engine.parts().storage.host
            host.evict(host.evictable())
    beside.core.abort_request(["aborted"])
    beside.finish()
    assert_same(beside.others(), plain.ask(beside.prompts, DECODED))
    settle(engine)
    engine.forget()
    assert_same(engine.ask([[*head, 502]]), plain.ask([[*head, 502]]))
    assert_same(engine.ask([asked.ids]), plain.ask([asked.ids]))


def test_the_others_may_end_before_a_blend_does(engine: Engine, plain: Elsewhere) -> None:
    asked = cached(engine, 480, 90, 64)
    for steps in (1, 2, 3):
        engine.forget()
        beside = Beside(engine, 490)
        beside.blend("blend", asked)
        for _ in range(steps):
            beside.step()
        beside.core.abort_request([f"decodes-{number}" for number in range(3)])
        beside.finish()
        assert_same(beside.answers("blend"), plain.ask([asked.ids]))


@pytest.mark.parametrize("at", ["load", "model"])
def test_a_blend_that_fails_between_two_steps_is_computed(
    engine: Engine, plain: Elsewhere, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """It fails every time, and is tried once."""
    asked = cached(engine, {"load": 500, "model": 505}[at], 90, 64)
    compute_again(engine, 0.2)
    place, name = {
        "load": (engine.worker.engine.connector.in_place, "load_layer"),
        "model": (engine.worker._blending._layers, "run"),
    }[at]
    own, failed = getattr(place, name), list[int]()

    def fail(*given: Any) -> Any:
        layer = given[0] if at == "model" else given[1]
        if layer == 2:
            failed.append(layer)
            raise RuntimeError("the device fails")
        return own(*given)

    monkeypatch.setattr(place, name, fail)
    before = count(engine, "failures")
    beside = Beside(engine, 510)
    beside.blend("blend", asked)
    beside.finish()
    assert failed
    assert count(engine, "failures") - before == 1
    assert_same(beside.answers("blend"), plain.ask([asked.ids]))
    assert_same(beside.others(), plain.ask(beside.prompts, DECODED))
    monkeypatch.undo()
    settle(engine)
    assert_same(engine.ask([asked.ids]), plain.ask([asked.ids]))


def test_nothing_of_it_is_found_by_the_same_prompt_asked_exactly(engine: Engine, plain: Elsewhere) -> None:
    asked = cached(engine, 520, 130, 101)
    compute_again(engine, 0.0)
    beside = Beside(engine, 530)
    beside.blend("blend", asked, 40)
    beside.finish()
    settle(engine)
    exact = plain.ask([asked.ids, asked.ids[:-3]])
    (blended,) = beside.answers("blend")
    assert blended.logprobs[:8] != exact[0].logprobs
    assert_same(engine.ask([asked.ids, asked.ids[:-3]]), exact)
    engine.forget()
    assert_same(engine.ask([asked.ids]), exact[:1])
