"""What cannot be loaded is computed: the same answers, nothing wrong stored, and an end to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import Engine, assert_same, prompt, started, with_lwkv

NUM_LAYERS = 4


ALONE = {"enable_prefix_caching": False}
WITH_PREFIX_CACHE = {"enable_prefix_caching": True}
STEP_BY_STEP = WITH_PREFIX_CACHE | {"async_scheduling": False}


@pytest.fixture(
    scope="module",
    params=[ALONE, WITH_PREFIX_CACHE, STEP_BY_STEP],
    ids=["alone", "with vLLM's prefix cache", "no step is scheduled ahead"],
)
def shared(llama: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with started(llama, **request.param, **with_lwkv()) as engine:
        assert engine.core.scheduler.scheduler_config.async_scheduling == (request.param is not STEP_BY_STEP)
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    shared.forget()
    shared.new_hits()
    yield shared
    shared.at_rest()


@pytest.fixture
def break_layer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes the next `times` loads of a layer fail on the device."""
    connector = engine.worker.engine.connector
    load_layer = connector.loader.load_layer

    def breaks(layer: int, times: int) -> None:
        left = [times]

        def failing(load: object, number: int, *rest: object) -> None:
            if number == layer and left[0] > 0:
                left[0] -= 1
                raise RuntimeError("the device fails")
            load_layer(load, number, *rest)

        monkeypatch.setattr(connector.loader, "load_layer", failing)

    return breaks


def prompts_of(seed: int) -> list[list[int]]:
    """Of these the first two will be cached, the second only in front; the last two begin alike."""
    return [
        prompt(seed, 300),
        prompt(seed + 1, 200) + prompt(seed + 2, 100),
        prompt(seed + 3, 250),
        prompt(seed, 256) + prompt(seed + 4, 100),
    ]


def evict_before_the_load(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all chunks go between the next lookup and its load."""
    begin = engine.worker.begin

    def evicts_first(orders: object) -> None:
        monkeypatch.undo()
        engine.evict_all()
        begin(orders)

    monkeypatch.setattr(engine.worker, "begin", evicts_first)


def abort_in_the_next_step(engine: Engine, name: str) -> None:
    """Have a request aborted when the next step is scheduled and its result has not come."""
    core = engine.core
    update = core.scheduler.update_from_output

    def aborts_first(*arguments: object) -> object:
        del core.scheduler.update_from_output
        engine.llm.llm_engine.abort_request([name])
        return update(*arguments)

    core.scheduler.update_from_output = aborts_first


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_layer_that_fails_costs_time_and_nothing_else(
    engine: Engine, plain: Elsewhere, break_layer: Callable[[int, int], None], layer: int
) -> None:
    prompts = prompts_of(1000 + 10 * layer)
    engine.ask([prompts[0], prompts[1][:200]])
    engine.forget()
    break_layer(layer, 1)
    assert_same(engine.ask(prompts), plain.ask(prompts))
    assert engine.worker.engine.stats()["load_failures"] > 0
    # What was stored since is right, and is found.
    engine.forget()
    engine.new_hits()
    answers = engine.ask(prompts)
    assert_same(answers, plain.ask(prompts))
    assert [answer.cached for answer in answers] == [256, 256, 192, 320]
    assert engine.new_hits() >= 256 + 256 + 192


def test_a_load_that_always_fails_is_not_tried_for_ever(
    engine: Engine, plain: Elsewhere, break_layer: Callable[[int, int], None]
) -> None:
    prompts = [prompt(1100, 300)]
    engine.ask(prompts)
    engine.forget()
    break_layer(1, 1000)
    assert_same(engine.ask(prompts), plain.ask(prompts))


def test_chunks_that_are_evicted_between_the_lookup_and_the_load_are_computed(
    engine: Engine, plain: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt(1200, 300), prompt(1201, 150)]
    engine.ask(prompts[:1])
    engine.forget()
    engine.new_hits()
    evict_before_the_load(engine, monkeypatch)
    assert_same(engine.ask(prompts), plain.ask(prompts))
    engine.forget()
    engine.new_hits()
    assert_same(engine.ask(prompts), plain.ask(prompts))
    assert engine.new_hits() == 256 + 128


def test_blocks_of_an_aborted_request_whose_load_failed_are_used_by_no_other_one(
    engine: Engine, plain: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = prompt(1400, 256)
    engine.ask([shared + prompt(1401, 40)])
    engine.forget()
    evict_before_the_load(engine, monkeypatch)
    engine.abort(shared + prompt(1402, 40), after_steps=1)
    for seed in (1403, 1404, 1405):
        prompts = [shared + prompt(seed, 40)]
        assert_same(engine.ask(prompts), plain.ask(prompts))
        engine.forget()


def test_what_an_aborted_request_has_computed_behind_shared_blocks_is_used_by_no_other_one(
    engine: Engine, plain: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that loads these blocks goes on, and its blocks are in vLLM's prefix cache again."""
    shared = prompt(1500, 256)
    engine.ask([shared])
    engine.forget()
    evict_before_the_load(engine, monkeypatch)
    ids = {"loads": shared + prompt(1501, 40), "aborted": shared + prompt(1502, 100)}
    for name in ids:
        engine.begin(name, ids[name])
    abort_in_the_next_step(engine, "aborted")
    loads = engine.step_until("loads")["loads"]
    assert_same([loads], plain.ask([ids["loads"]]))
    again = [ids["aborted"]]
    assert_same(engine.ask(again), plain.ask(again))


def test_nothing_is_stored_of_a_step_whose_hooks_did_not_come(
    engine: Engine, plain: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a graph is replayed that was captured without them."""
    prompts = [prompt(1300, 300), prompt(1301, 150)]
    engine.ask(prompts[:1])
    engine.forget()
    worker = engine.worker
    begin = worker.begin

    def deaf(orders: object) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(worker, "wait_for_layer", lambda name: None)
        monkeypatch.setattr(worker, "save_layer", lambda name: None)
        monkeypatch.setattr(worker, "begin", hears_again)
        begin(orders)

    def hears_again(orders: object) -> None:
        monkeypatch.undo()
        begin(orders)

    monkeypatch.setattr(worker, "begin", deaf)
    assert_same(engine.ask(prompts), plain.ask(prompts))
    engine.forget()
    assert_same(engine.ask(prompts), plain.ask(prompts))


def test_requests_that_share_blocks_of_a_failed_load_are_right_where_few_tokens_are_computed_in_a_step(
    llama: Path, plain: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"long_prefill_token_threshold": 64, "max_num_batched_tokens": 200}
    head = prompt(1700, 256)
    prompts = [head + prompt(1701 + number, 60) for number in range(3)]
    with started(llama, enable_prefix_caching=True, **few, **with_lwkv()) as engine:
        engine.ask([head])
        engine.forget()
        loader = engine.worker.engine.connector.loader
        load_layer, left = loader.load_layer, [1]

        def fails_once(load: object, number: int, *rest: object) -> None:
            if number == NUM_LAYERS - 1 and left[0] > 0:
                left[0] = 0
                raise RuntimeError("the device fails")
            load_layer(load, number, *rest)

        monkeypatch.setattr(loader, "load_layer", fails_once)
        assert_same(engine.ask(prompts), plain.ask(prompts))
        assert engine.worker.engine.stats()["load_failures"] > 0
        engine.at_rest()
