"""The engine: a fixed number of steps, exact bytes and nothing held at rest, whatever happens."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from oracle import Dims, MemoryTier, Oracle, held_completions, refuse_threads, require_rest, run_slots

import lwkv
import lwkv.pipeline.tier_pages
from lwkv.config.settings import Config
from lwkv.connectors.row_tables import RowTables
from lwkv.engine import CacheEngine, Request
from lwkv.errors import ClosedError, ConfigError, LayoutError, RequestError
from lwkv.metadata import CacheMetadata
from lwkv.platforms import Platform, open_platform
from lwkv.steps import LayerSteps
from lwkv.storage import Status

CHUNK = 8
LAYERS = 3
MOST_TOKENS = 27
EVERY_PATH = settings(
    max_examples=min(60, settings.default.max_examples),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def prompt(number: int, length: int = MOST_TOKENS) -> list[int]:
    return [1000 * number + i for i in range(length)]


@dataclass(frozen=True)
class Share:
    """One request of a batch: its length, how much of it is cached and in the engine, where it goes."""

    length: int
    cached: int
    local: int
    backwards: bool

    def mask(self) -> list[bool]:
        return [i >= self.local for i in range(self.length)]


@dataclass(frozen=True)
class Case:
    """What one run goes through."""

    shares: tuple[Share, ...]
    buffered: bool
    tier: bool
    partial: bool
    frozen: bool
    pages: int
    staging_chunks: int
    lookahead: int
    group_chunks: int
    prefetch: int
    sync: bool
    failing_layer: int | None
    failure: str | None
    steps: int | None


def shares() -> st.SearchStrategy[Share]:
    def make(length: int, cached: int, local: int, backwards: bool) -> Share:
        return Share(length, min(cached, length), min(local, length), backwards)

    return st.builds(
        make,
        st.integers(0, MOST_TOKENS),
        st.integers(0, MOST_TOKENS),
        st.sampled_from([0, 0, 3, 8, 9, 16, 27]),
        st.booleans(),
    )


CASES = st.builds(
    Case,
    shares=st.lists(shares(), min_size=1, max_size=2).map(tuple),
    buffered=st.booleans(),
    tier=st.booleans(),
    partial=st.booleans(),
    frozen=st.booleans(),
    pages=st.sampled_from([2, 8, 64]),
    staging_chunks=st.integers(1, 3),
    lookahead=st.integers(0, 3),
    group_chunks=st.integers(0, 9),
    prefetch=st.integers(0, 3),
    sync=st.booleans(),
    failing_layer=st.none() | st.integers(0, LAYERS - 1),
    failure=st.sampled_from([None] * 5)
    | st.sampled_from(["begin", "table", "pinned table", "second layer", "leave", "end"])
    | st.sampled_from([f"wait for layer {layer}" for layer in range(LAYERS)]),
    steps=st.none() | st.integers(0, LAYERS + 1),
)
HIT = Case(
    (Share(24, 24, 0, False),), False, False, False, False, 64, 1, 1, 0, 2, True, None, None, None
)  # paged, single, all of it


def start(case: Case, oracle: Oracle, tier: MemoryTier) -> CacheEngine:
    return oracle.engine(
        CHUNK,
        case.pages,
        tiers=[tier] if case.tier else [],
        staging_bytes=4 * case.staging_chunks * oracle.page_bytes(CHUNK),
        lookahead=case.lookahead,
        group_bytes=case.group_chunks * oracle.page_bytes(CHUNK),
        prefetch_layers=case.prefetch,
        save_unfull_chunk=case.partial,
        enable_blending=case.buffered,
    )


def slots_of(case: Case, first: int) -> list[list[int]]:
    return [run_slots(first + 32 * i, share.length, share.backwards) for i, share in enumerate(case.shares)]


def requests_of(case: Case, slots: Sequence[Sequence[int]], masked: bool = True) -> list[Request]:
    return [
        Request(prompt(i, share.length), slots[i], share.mask() if masked else None)
        for i, share in enumerate(case.shares)
    ]


def fill(case: Case, oracle: Oracle, engine: CacheEngine) -> None:
    """Store what is to be cached, then let other tokens have the slots."""
    for i, share in enumerate(case.shares):
        tokens, slots = prompt(i, share.cached), run_slots(32 * i, share.cached)
        oracle.compute(tokens, slots)
        engine.store(tokens, slot_mapping=slots)
        assert engine.flush()
        oracle.zero(slots)


@contextmanager
def failing_device(engine: CacheEngine, place: str | None) -> Iterator[None]:
    """Inside, the device fails at `place`, or has no memory, nor has the host any to page-lock."""
    connector: Any = engine.connector
    with pytest.MonkeyPatch.context() as monkeypatch:
        if place == "begin":
            monkeypatch.setattr(connector.loader, "begin_load", refuse(torch.OutOfMemoryError))
            monkeypatch.setattr(connector.saver, "begin_save", refuse(torch.OutOfMemoryError))
        elif place == "end":
            # Of a store whose end cannot be waited for nobody gets the pages: that is a test of its own.
            monkeypatch.setattr(connector.loader, "end_load", refuse(RuntimeError))
        elif place == "leave":
            monkeypatch.setattr(connector.loader, "leave_load", refuse(RuntimeError))
            monkeypatch.setattr(connector.saver, "leave_save", refuse(RuntimeError))
        elif place == "table":
            monkeypatch.setattr(RowTables, "send", take_table_and_fail)
        elif place == "pinned table":
            monkeypatch.setattr(RowTables, "new_table", refuse(MemoryError))
        elif place == "second layer":
            for half, name in ((connector.loader, "load_layer"), (connector.saver, "save_layer")):
                monkeypatch.setattr(half, name, refuse_second(getattr(half, name)))
        elif place is not None:
            layer = int(place.split()[-1])
            wait_layer = connector.loader.wait_layer
            monkeypatch.setattr(connector.loader, "wait_layer", refuse_layer(wait_layer, layer))
        yield


def take_table_and_fail(uploads: RowTables, values: torch.Tensor) -> None:
    uploads.new_table(values.nbytes)
    raise torch.OutOfMemoryError("no memory left, says the test")


def refuse_layer(call: Callable[[Any, int], None], refused: int) -> Callable[[Any, int], None]:
    def wait_layer(load: Any, layer: int) -> None:
        if layer == refused:
            raise RuntimeError(f"layer {layer} cannot be waited for, says the test")
        call(load, layer)

    return wait_layer


def refuse(error: type[Exception]) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error("no memory left, says the test")

    return call


def refuse_second(call: Callable[..., Any]) -> Callable[..., Any]:
    calls = []

    def refuse(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory for the second layer, says the test")
        return call(*arguments)

    return refuse


def take(steps: Generator[Any, None, None], number: int | None) -> list[Any]:
    """Take `number` steps and close, or all there are."""
    taken = []
    with closing(steps):
        while number is None or len(taken) < number:
            item = next(steps, "ended")
            if item == "ended":
                break
            taken.append(item)
    return taken


@EVERY_PATH
@given(CASES)
@example(HIT)
def test_retrieving_takes_the_same_steps_and_loads_what_it_says_on_every_path(
    platform: Platform, device: torch.device, case: Case
) -> None:
    oracle, tier = Oracle(platform, device, dims=Dims(blocks=32)), MemoryTier()
    with start(case, oracle, tier) as engine:
        fill(case, oracle, engine)
        tier.fails = lambda key: Status.ERROR if key.layer == case.failing_layer else Status.OK
        engine.freeze(case.frozen)
        slots = slots_of(case, 64)
        for share, places in zip(case.shares, slots, strict=True):
            oracle.compute(prompt(99, share.length), places)
        with failing_device(engine, case.failure):
            taken = take(engine.retrieve_batch(requests_of(case, slots), sync=case.sync), case.steps)
        assert len(taken) == (LAYERS + 2 if case.steps is None else case.steps)
        if case.steps is None:
            require_loaded(case, oracle, slots, *taken[:: LAYERS + 1])
        require_rest(engine)
    require_closed(engine)


def require_loaded(
    case: Case,
    oracle: Oracle,
    slots: Sequence[Sequence[int]],
    promised: list[int],
    masks: list[torch.Tensor],
) -> None:
    """The masks are honest; what they leave out of the promise may hold anything of the right tokens."""
    for i, share in enumerate(case.shares):
        mask = masks[i].numpy()
        assert mask.shape == (share.length,)
        places = np.arange(share.length)
        promise = (places >= share.local) & (places < share.local + promised[i])
        assert not (mask & ~promise).any()
        if case.pages == 64 and case.failing_layer is None and case.failure is None:
            assert (mask == promise).all()
        oracle.expect(prompt(i, share.length), slots[i], mask)
        oracle.forget(slots[i], promise & ~mask)
    oracle.check()


def require_closed(engine: CacheEngine) -> None:
    assert engine.flush()
    stats = engine.stats()
    assert (stats["pins"], stats["writes_in_flight"], stats["page_references"]) == (0, 0, 0)


@EVERY_PATH
@given(CASES)
@example(HIT)
def test_storing_takes_the_same_steps_and_keeps_all_or_nothing_on_every_path(
    platform: Platform, device: torch.device, case: Case
) -> None:
    oracle, tier = Oracle(platform, device, dims=Dims(blocks=32)), MemoryTier()
    with start(case, oracle, tier) as engine:
        fill(case, oracle, engine)
        known = [engine.lookup(request.tokens) for request in requests_of(case, slots_of(case, 64))]
        slots = slots_of(case, 64)
        for i, share in enumerate(case.shares):
            oracle.compute(prompt(i, share.length), slots[i])
        engine.freeze(case.frozen)
        with failing_device(engine, case.failure):
            taken = take(engine.store_batch(requests_of(case, slots)), case.steps)
        assert len(taken) == (LAYERS + 1 if case.steps is None else case.steps)
        require_rest(engine)
        unhindered = case.steps is None and case.failure is None and not case.frozen
        for i, share in enumerate(case.shares):
            found = engine.lookup(prompt(i, share.length))
            if unhindered and case.pages == 64:
                assert found == expected_prefix(case, share, known[i])
            require_cached(case, oracle, engine, prompt(i, share.length), found, 64 + 32 * i)
        oracle.check()
        require_rest(engine)
    require_closed(engine)


def expected_prefix(case: Case, share: Share, known: int) -> int:
    """Chunks wholly in the masked part are left out, so the prefix ends there unless they were known."""
    whole = share.length if case.partial else share.length - share.length % CHUNK
    first_stored = share.local - share.local % CHUNK
    return whole if share.local < whole and first_stored <= known else known


def require_cached(
    case: Case, oracle: Oracle, engine: CacheEngine, tokens: list[int], found: int, first: int
) -> None:
    """What is found can be loaded, room permitting, and is what was computed."""
    slots = run_slots(first, len(tokens), backwards=True)
    oracle.zero(slots)
    mask = engine.retrieve(tokens, slot_mapping=slots).numpy()
    promise = np.arange(len(tokens)) < found
    assert not (mask & ~promise).any()
    if case.pages == 64:
        assert (mask == promise).all()
    oracle.expect(tokens, slots, mask)
    oracle.forget(slots, promise & ~mask)


@pytest.fixture
def oracle(platform: Platform, device: torch.device) -> Oracle:
    return Oracle(platform, device, dims=Dims(blocks=32))


def store(oracle: Oracle, engine: CacheEngine, tokens: list[int], slots: list[int]) -> None:
    """Store what the model computes, and wait until it is visible."""
    oracle.compute(tokens, slots)
    engine.store(tokens, slot_mapping=slots)
    assert engine.flush()
    oracle.zero(slots)


def store_in(oracle: Oracle, tier: MemoryTier, tokens: Sequence[list[int]]) -> None:
    """Leave the KV of several prompts in a lower tier only."""
    with oracle.engine(CHUNK, tiers=[tier]) as engine:
        for prompt_tokens in tokens:
            store(oracle, engine, prompt_tokens, run_slots(0, len(prompt_tokens)))


def error_of(layer: int, chunk: Any) -> Callable[[Any], Status]:
    return lambda key: Status.ERROR if (key.chunk, key.layer) == (chunk, layer) else Status.OK


# What is retrieved.


@pytest.mark.parametrize(
    "settings",
    [{"use_layerwise": False}, {}, {"enable_blending": True}],
    ids=["bulk", "layer by layer", "buffer"],
)
def test_what_was_stored_comes_back_into_other_slots(oracle: Oracle, settings: dict[str, Any]) -> None:
    tokens, into = prompt(1), run_slots(64, MOST_TOKENS, backwards=True)
    with oracle.engine(CHUNK, **settings) as engine:
        store(oracle, engine, tokens, run_slots(0, MOST_TOKENS))
        assert engine.lookup(tokens) == 24
        mask = engine.retrieve(tokens, slot_mapping=into)
        assert mask.tolist() == [True] * 24 + [False] * 3
        oracle.expect(tokens, into, mask)
        oracle.check()
        require_rest(engine)


def test_a_batch_of_no_requests_takes_as_many_steps(oracle: Oracle) -> None:
    with oracle.engine(CHUNK) as engine:
        assert list(engine.retrieve_batch([])) == [[], *[None] * LAYERS, []]
        assert list(engine.store_batch([])) == [None] * (LAYERS + 1)
        require_rest(engine)


def test_tokens_may_come_in_any_container(oracle: Oracle) -> None:
    with oracle.engine(CHUNK) as engine:
        store(oracle, engine, prompt(1, 8), run_slots(0, 8))
        ids = prompt(1, 8)
        for tokens in (tuple(ids), np.array(ids, np.int32), torch.tensor(ids), torch.tensor(ids).int()):
            assert engine.retrieve(tokens, slot_mapping=torch.arange(64, 72)).all()
            oracle.expect(ids, run_slots(64, 8))
        oracle.check()


def test_another_salt_is_another_prompt(oracle: Oracle) -> None:
    with oracle.engine(CHUNK) as engine:
        store(oracle, engine, prompt(1, 8), run_slots(0, 8))
        assert engine.lookup(prompt(1, 8), salts=["lora"]) == 0
        assert not engine.retrieve(prompt(1, 8), slot_mapping=run_slots(8, 8), salts=("lora",)).any()
        oracle.check()
        require_rest(engine)


def test_tokens_without_a_slot_are_neither_promised_nor_loaded(oracle: Oracle) -> None:
    tokens, into = prompt(1, 16), run_slots(64, 16)
    into[3] = into[4] = into[11] = -1
    with oracle.engine(CHUNK) as engine:
        store(oracle, engine, tokens, run_slots(0, 16))
        promised, *_, mask = engine.retrieve_layer(tokens, slot_mapping=into)
        assert promised == 13
        assert mask.tolist() == [slot != -1 for slot in into]
        oracle.expect(tokens, into, mask)
        oracle.check()


def test_a_chunk_that_lacks_a_slot_is_not_stored(oracle: Oracle) -> None:
    tokens, slots = prompt(1, 24), run_slots(0, 24)
    slots[12] = -1
    with oracle.engine(CHUNK) as engine:
        oracle.compute(tokens, slots)
        engine.store(tokens, slot_mapping=slots)
        require_rest(engine)
        assert engine.stats()["chunks"] == 2
        assert engine.lookup(tokens) == 8


def test_requests_that_share_a_prefix_store_it_once(oracle: Oracle) -> None:
    shared = prompt(1, 16)
    requests = [
        Request(shared + prompt(2, 8), run_slots(0, 24)),
        Request(shared + prompt(3, 8), run_slots(32, 24)),
    ]
    with oracle.engine(CHUNK) as engine:
        for request in requests:
            oracle.compute(request.tokens, request.slot_mapping)
        for _ in engine.store_batch(requests):
            pass
        require_rest(engine)
        assert engine.stats()["chunks"] == 4
        for request in requests:
            oracle.zero(request.slot_mapping)
        *_, masks = engine.retrieve_batch(requests)
        for request, mask in zip(requests, masks, strict=True):
            oracle.expect(request.tokens, request.slot_mapping, mask)
            assert mask.all()
        oracle.check()


@pytest.mark.parametrize("buffers", [2, 3, 4, 7])
@pytest.mark.parametrize("taken", range(LAYERS + 2))
def test_retrievals_may_take_their_steps_in_turn(oracle: Oracle, taken: int, buffers: int) -> None:
    lengths, slots = (8, 24, 16), [run_slots(first, 24) for first in (32, 64, 96)]
    with oracle.engine(CHUNK, staging_buffers=buffers) as engine:
        for i, length in enumerate(lengths):
            store(oracle, engine, prompt(i, length), run_slots(0, length))
        retrievals = [
            engine.retrieve_layer(prompt(i, length), slot_mapping=slots[i][:length])
            for i, length in enumerate(lengths)
        ]
        for _ in range(taken):
            next(retrievals[0])
        for steps in retrievals[1:]:
            next(steps)
        for steps in zip(*retrievals, strict=False):
            assert len(steps) == 3
        for i, length in enumerate(lengths):
            assert all(step is None or torch.is_tensor(step) for step in retrievals[i])
            oracle.expect(prompt(i, length), slots[i][:length])
        oracle.check()
        require_rest(engine)


def test_two_engines_in_one_process_keep_apart(platform: Platform, device: torch.device) -> None:
    one, other = Oracle(platform, device), Oracle(platform, device)
    with one.engine(CHUNK) as first, other.engine(CHUNK) as second:
        store(one, first, prompt(1, 16), run_slots(0, 16))
        store(other, second, prompt(2, 16), run_slots(16, 16))
        assert (first.lookup(prompt(2, 16)), second.lookup(prompt(1, 16))) == (0, 0)
        assert first.retrieve(prompt(1, 16), slot_mapping=run_slots(32, 16)).all()
        assert second.retrieve(prompt(2, 16), slot_mapping=run_slots(32, 16)).all()
        one.expect(prompt(1, 16), run_slots(32, 16))
        other.expect(prompt(2, 16), run_slots(32, 16))
        one.check()
        other.check()


def test_a_failed_transfer_of_memory_to_staging_leaves_the_lane_fit(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with oracle.engine(CHUNK) as engine:
        store(oracle, engine, prompt(1, 16), run_slots(0, 16))
        with monkeypatch.context() as refused:
            refused.setattr(type(engine.connector.platform), "load_batch", refuse(MemoryError))
            assert not engine.retrieve(prompt(1, 16), slot_mapping=run_slots(64, 16)).any()
        assert engine.retrieve(prompt(1, 16), slot_mapping=run_slots(64, 16)).all()
        oracle.expect(prompt(1, 16), run_slots(64, 16))
        oracle.check()
        require_rest(engine)


# Lower tiers that fail.


@pytest.mark.parametrize("buffered", [False, True], ids=["paged", "buffer"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layer_that_fails_costs_only_the_tokens_of_its_chunk(
    oracle: Oracle, layer: int, buffered: bool
) -> None:
    tier, prompts = MemoryTier(), [prompt(i, 24) for i in range(3)]
    store_in(oracle, tier, prompts)
    with oracle.engine(CHUNK, tiers=[tier], enable_blending=buffered) as engine:
        tier.fails = error_of(layer, chunk_of(engine, prompts[1], 1))
        slots = [run_slots(32 * i + 3, 24, backwards=i == 2) for i in range(3)]
        requests = [Request(*request) for request in zip(prompts, slots, strict=True)]
        promised, *_, masks = engine.retrieve_batch(requests)
        assert promised == [24, 24, 24]
        wanted = [[True] * 24, [True] * 8 + [False] * 8 + [True] * 8, [True] * 24]
        assert [mask.tolist() for mask in masks] == wanted
        for tokens, places, mask in zip(prompts, slots, masks, strict=True):
            oracle.expect(tokens, places, mask)
        oracle.expect(prompts[1], slots[1], ~masks[1].numpy(), layers=range(layer))
        oracle.check()
        require_rest(engine)
        assert engine.stats()["load_failures"] == 1


def chunk_of(engine: CacheEngine, tokens: list[int], number: int) -> Any:
    return engine._prompt_keys.keys(np.asarray(tokens), ())[number]


def test_a_chunk_that_vanishes_after_lookup_is_a_miss(oracle: Oracle) -> None:
    tier = MemoryTier()
    store_in(oracle, tier, [prompt(1, 16)])
    with oracle.engine(CHUNK, tiers=[tier]) as engine:
        tier.fails = lambda key: Status.MISS
        promised, *_, mask = engine.retrieve_layer(prompt(1, 16), slot_mapping=run_slots(64, 16))
        assert (promised, mask.any()) == (16, False)
        oracle.check()
        require_rest(engine)


def test_what_came_from_a_lower_tier_is_in_host_memory_next_time(oracle: Oracle) -> None:
    tier = MemoryTier()
    store_in(oracle, tier, [prompt(1, 16)])
    with oracle.engine(CHUNK, tiers=[tier]) as engine:
        for into in (64, 96):
            assert engine.retrieve(prompt(1, 16), slot_mapping=run_slots(into, 16)).all()
            oracle.expect(prompt(1, 16), run_slots(into, 16))
            require_rest(engine)
        assert len(tier.asked) == 2 * LAYERS
        oracle.check()


def test_only_the_chunks_to_load_are_asked_for(oracle: Oracle) -> None:
    tier = MemoryTier()
    store_in(oracle, tier, [prompt(1, 24)])
    with oracle.engine(CHUNK, tiers=[tier]) as engine:
        mask = [i >= 8 for i in range(24)]
        assert engine.retrieve(prompt(1, 24), mask, slot_mapping=run_slots(64, 24)).tolist() == mask
        wanted = {chunk_of(engine, prompt(1, 24), number) for number in (1, 2)}
        assert {key.chunk for key in tier.asked} == wanted
        oracle.expect(prompt(1, 24), run_slots(64, 24), mask)
        oracle.check()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("buffered", [False, True], ids=["paged", "buffer"])
def test_a_layer_is_waited_for_and_computed_while_the_next_one_has_not_arrived(
    oracle: Oracle, buffered: bool, prefetch: int
) -> None:
    tokens, into = prompt(1, 16), run_slots(64, 16)
    tier, gates = MemoryTier(), [threading.Event() for _ in range(LAYERS)]
    store_in(oracle, tier, [tokens])
    tier.fails = lambda key: Status.OK if gates[key.layer].wait(20) else Status.ERROR
    with oracle.engine(CHUNK, tiers=[tier], enable_blending=buffered, prefetch_layers=prefetch) as engine:
        steps = engine.retrieve_layer(tokens, slot_mapping=into)
        next(steps), next(steps)
        for layer, gate in enumerate(gates):
            gate.set()
            mask = next(steps)
            oracle.expect(tokens, into, layers=[layer])
            oracle.check()
        assert isinstance(mask, torch.Tensor)
        assert mask.all()
        require_rest(engine)


def test_without_sync_the_host_waits_for_slow_tiers_in_the_last_step_only(
    oracle: Oracle, hanging: MemoryTier
) -> None:
    with oracle.engine(CHUNK, tiers=[hanging]) as engine:
        steps = engine.retrieve_layer(prompt(1, 16), slot_mapping=run_slots(64, 16), sync=False)
        for _ in range(LAYERS + 1):
            next(steps)
        oracle.check()
        hanging.gate.set()
        mask = next(steps)
        assert isinstance(mask, torch.Tensor)
        assert mask.all()
        oracle.expect(prompt(1, 16), run_slots(64, 16))
        oracle.check()
        steps.close()
        require_rest(engine)


@pytest.mark.parametrize("kind", ["growth", "memory-look-up", "memory-read", "memory-write"])
def test_a_thread_that_cannot_start_is_a_miss_and_nothing_stays_held(
    oracle: Oracle, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = MemoryTier()
    store_in(oracle, tier, [prompt(1, 16)])
    with oracle.engine(CHUNK, tiers=[tier]) as engine:
        with monkeypatch.context() as limited:
            refuse_threads(limited, kind)
            assert engine.lookup(prompt(1, 16)) == (0 if kind == "memory-look-up" else 16)
            loaded = int(engine.retrieve(prompt(1, 16), slot_mapping=run_slots(64, 16)).sum())
            assert loaded == (0 if kind in ("memory-look-up", "memory-read") else 16)
            oracle.expect(prompt(1, 16)[:loaded], run_slots(64, loaded))
            oracle.compute(prompt(2, 16), run_slots(0, 16))
            engine.store(prompt(2, 16), slot_mapping=run_slots(0, 16))
            assert engine.flush() == (kind != "memory-write")
            assert engine.lookup(prompt(2, 16)) == 16
            require_rest(engine)
        assert engine.lookup(prompt(1, 16)) == 16
        assert "transfer_errors" not in engine.stats()
        oracle.check()


@pytest.fixture
def hanging(oracle: Oracle) -> Iterator[MemoryTier]:
    """A tier with prompt 1 that never answers while the test runs."""
    tier = MemoryTier()
    store_in(oracle, tier, [prompt(1, 16)])
    tier.gate.clear()
    yield tier
    tier.gate.set()


def test_a_tier_that_hangs_is_a_miss_after_the_timeout(oracle: Oracle, hanging: MemoryTier) -> None:
    with oracle.engine(CHUNK, tiers=[hanging], load_timeout_s=0.05) as engine:
        store(oracle, engine, prompt(2, 8), run_slots(0, 8))
        requests = [Request(prompt(1, 16), run_slots(64, 16)), Request(prompt(2, 8), run_slots(96, 8))]
        steps = list(engine.retrieve_batch(requests))
        assert len(steps) == LAYERS + 2
        assert [int(mask.sum()) for mask in steps[-1]] == [0, 8]
        oracle.expect(prompt(2, 8), run_slots(96, 8))
        oracle.check()
        hanging.gate.set()
        require_rest(engine)


def test_what_arrives_after_the_timeout_never_reaches_the_cache(oracle: Oracle, hanging: MemoryTier) -> None:
    with oracle.engine(CHUNK, tiers=[hanging], load_timeout_s=0.05, prefetch_layers=0) as engine:
        steps = engine.retrieve_layer(prompt(1, 16), slot_mapping=run_slots(64, 16))
        next(steps), next(steps), next(steps)
        hanging.gate.set()
        *_, mask = steps
        assert not mask.any()
        oracle.check()
        require_rest(engine)


def test_closing_does_not_wait_for_ever_for_a_tier_that_hangs(oracle: Oracle, hanging: MemoryTier) -> None:
    engine = oracle.engine(CHUNK, tiers=[hanging], load_timeout_s=0.02)
    assert not engine.retrieve(prompt(1, 16), slot_mapping=run_slots(64, 16)).any()
    engine.close(timeout_s=0.05)
    hanging.gate.set()
    oracle.check()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """How many futures a retrieval waited for, and how long it would have."""
    waited: list[tuple[int, float]] = []

    def record(futures: Sequence[Any], timeout: float) -> Any:
        waited.append((len(futures), timeout))
        return wait(futures, 0)

    monkeypatch.setattr(lwkv.pipeline.tier_pages, "wait", record)
    return waited


def test_the_deadline_of_a_layer_counts_from_when_it_was_asked_for(
    oracle: Oracle, hanging: MemoryTier, waits: list[tuple[int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the model took for the layers before."""
    now = [0.0]
    with oracle.engine(CHUNK, tiers=[hanging], load_timeout_s=12, prefetch_layers=0) as engine:
        engine._parts = replace(engine._parts, clock=lambda: now[0])
        record = lwkv.pipeline.tier_pages.wait

        def answer(futures: Any, timeout: float) -> None:
            record(futures, timeout)
            hanging.gate.set()
            assert not wait(futures, 20).not_done

        monkeypatch.setattr(lwkv.pipeline.tier_pages, "wait", answer)
        steps = engine.retrieve_layer(prompt(1, 16), slot_mapping=run_slots(64, 16))
        for _ in range(LAYERS + 1):
            next(steps)
            if hanging.gate.is_set():
                assert engine._storage.wait_idle(20)
                hanging.gate.clear()
            now[0] += 5
        assert next(steps).all()  # type: ignore[union-attr]
        # Layer 0 is asked for at 0 s and waited for at 10 s, layer 2 at 15 s and 20 s; layer 1 has arrived.
        assert waits == [(1, 2.0), (1, 7.0)]
        oracle.expect(prompt(1, 16), run_slots(64, 16))
        oracle.check()
        steps.close()
        require_rest(engine)


def test_nobody_waits_for_layers_of_chunks_that_were_lost_before(
    oracle: Oracle, waits: list[tuple[int, float]]
) -> None:
    tier = MemoryTier()
    store_in(oracle, tier, [prompt(1, 16)])
    with oracle.engine(CHUNK, tiers=[tier], prefetch_layers=0) as engine:
        store(oracle, engine, prompt(2, 8), run_slots(0, 8))
        tier.gate.clear()
        requests = [Request(prompt(1, 16), run_slots(64, 16)), Request(prompt(2, 8), run_slots(96, 8))]
        *_, masks = engine.retrieve_batch(requests)
        tier.gate.set()
        assert [int(mask.sum()) for mask in masks] == [0, 8]
        assert [count for count, _ in waits] == [1] + [0] * (LAYERS - 1)
        oracle.expect(prompt(2, 8), run_slots(96, 8))
        oracle.check()
        require_rest(engine)


def test_counters_tell_why_chunks_were_lost(oracle: Oracle, waits: list[tuple[int, float]]) -> None:
    tier, prompts = MemoryTier(), [prompt(i, 8) for i in range(4)]
    store_in(oracle, tier, prompts)
    endings = {0: Status.MISS, 1: Status.ERROR, 2: Status.ERROR}
    with oracle.engine(CHUNK, tiers=[tier]) as engine:
        lost = {chunk_of(engine, prompts[i], 0): ending for i, ending in endings.items()}
        tier.fails = lambda key: lost.get(key.chunk, Status.OK)
        requests = [Request(tokens, run_slots(32 * i, 8)) for i, tokens in enumerate(prompts[:3])]
        steps = engine.retrieve_batch(requests)
        next(steps)
        assert engine._storage.wait_idle(20)
        list(steps)
        tier.gate.clear()
        assert not engine.retrieve(prompts[3], slot_mapping=run_slots(96, 8)).any()
        tier.gate.set()
        require_rest(engine)
        stats = engine.stats()
        reasons = {name: count for name, count in stats.items() if name.startswith("load_failures")}
        assert reasons == {
            "load_failures": 4,
            "load_failures_miss": 1,
            "load_failures_error": 2,
            "load_failures_late": 1,
        }


# A device that fails.


@pytest.mark.parametrize("buffered", [False, True], ids=["paged", "buffer"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_wait_that_fails_is_a_miss_in_as_many_steps_and_nothing_stays_held(
    oracle: Oracle, layer: int, buffered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, into = prompt(1, 24), run_slots(64, 24)
    with oracle.engine(CHUNK, enable_blending=buffered) as engine:
        store(oracle, engine, tokens, run_slots(0, 24))
        caplog.clear()
        with failing_device(engine, f"wait for layer {layer}"):
            taken = list(engine.retrieve_layer(tokens, slot_mapping=into))
        assert len(taken) == LAYERS + 2
        assert taken[0] == 24
        assert not taken[-1].any()  # type: ignore[union-attr]
        require_rest(engine)
        assert engine.stats()["load_failures_device"] == 3
        assert [record.getMessage()[:24] for record in caplog.records] == ["3 chunks are not loaded,"]
        assert engine.retrieve(tokens, slot_mapping=into).all()
        oracle.expect(tokens, into)
        oracle.check()


def test_a_store_whose_end_cannot_be_waited_for_gives_its_pages_to_nobody(oracle: Oracle) -> None:
    engine = oracle.engine(CHUNK)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(engine.connector.saver, "end_save", refuse(RuntimeError))
        oracle.compute(prompt(1, 16), run_slots(0, 16))
        engine.store(prompt(1, 16), slot_mapping=run_slots(0, 16))
        assert engine.flush()
    assert engine.lookup(prompt(1, 16)) == 0
    stats = engine.stats()
    assert (stats["transfer_errors"], stats["pages_in_use"]) == (1, 2 * LAYERS)
    engine.close()


# Closing.


def test_closing_waits_for_what_is_in_flight(oracle: Oracle) -> None:
    engine, tier = None, MemoryTier()
    engine = oracle.engine(CHUNK, tiers=[tier])
    oracle.compute(prompt(1, 16), run_slots(0, 16))
    engine.store(prompt(1, 16), slot_mapping=run_slots(0, 16))
    engine.close()
    require_closed(engine)
    assert tier.closed
    assert len(tier.pages) == 2 * LAYERS


@pytest.mark.parametrize("taken", range(1, LAYERS + 2))
def test_a_retrieval_may_end_after_the_engine_was_closed(oracle: Oracle, taken: int) -> None:
    engine = oracle.engine(CHUNK)
    store(oracle, engine, prompt(1, 16), run_slots(0, 16))
    steps = engine.retrieve_layer(prompt(1, 16), slot_mapping=run_slots(64, 16))
    for _ in range(taken):
        next(steps)
    engine.close()
    *_, mask = steps
    assert mask.all()
    oracle.expect(prompt(1, 16), run_slots(64, 16))
    oracle.check()
    require_closed(engine)


@pytest.mark.parametrize("taken", range(1, LAYERS + 2))
def test_a_retrieval_may_be_given_up_after_the_engine_was_closed(oracle: Oracle, taken: int) -> None:
    engine = oracle.engine(CHUNK)
    store(oracle, engine, prompt(1, 16), run_slots(0, 16))
    steps = engine.retrieve_layer(prompt(1, 16), slot_mapping=run_slots(64, 16))
    for _ in range(taken):
        next(steps)
    engine.close()
    assert engine.stats()["chunks"] == 2
    steps.close()
    require_closed(engine)
    assert engine.stats()["chunks"] == engine.stats()["pages_in_use"] == 0


@pytest.mark.parametrize("taken", range(1, LAYERS + 1))
def test_a_store_may_end_after_the_engine_was_closed(oracle: Oracle, taken: int) -> None:
    engine = oracle.engine(CHUNK)
    oracle.compute(prompt(1, 16), run_slots(0, 16))
    steps = engine.store_layer(prompt(1, 16), slot_mapping=run_slots(0, 16))
    for _ in range(taken):
        next(steps)
    engine.close()
    assert len(list(steps)) == LAYERS + 1 - taken
    require_closed(engine)


def test_a_connector_without_caches_is_refused(oracle: Oracle) -> None:
    config, metadata = Config(max_local_cpu_size=0.01), oracle.metadata
    connector = lwkv.CreateGPUConnector(
        config, metadata, layout_hints={"block_size": 4, "layout": "vllm_2bnhd"}, platform=oracle.platform
    )
    assert connector.num_layers == 0
    with pytest.raises(ConfigError, match="no KV caches: call its register before"):
        CacheEngine(config, metadata, connector)


def test_a_closed_engine_says_so(oracle: Oracle) -> None:
    engine = oracle.engine(CHUNK)
    engine.close()
    engine.close()
    arguments: Any = {"slot_mapping": run_slots(0, 8)}
    for call in (
        lambda: engine.lookup(prompt(1, 8)),
        lambda: engine.retrieve_layer(prompt(1, 8), **arguments),
        lambda: engine.store(prompt(1, 8), **arguments),
        lambda: engine.store_batch([Request(prompt(1, 8), run_slots(0, 8))]),
        engine.freeze,
        engine.__enter__,
        lambda: LayerSteps(engine).begin([Request(prompt(1, 8), run_slots(0, 8))], []),
    ):
        with pytest.raises(ClosedError, match="make a new one"):
            call()
    assert engine.flush()
    assert engine.stats()["pages_in_use"] == 0


def test_flushing_gives_up_at_its_timeout(oracle: Oracle) -> None:
    with oracle.engine(CHUNK) as engine:
        with held_completions(engine):
            oracle.compute(prompt(1, 8), run_slots(0, 8))
            engine.store(prompt(1, 8), slot_mapping=run_slots(0, 8))
            assert not engine.flush(timeout_s=0.01)
            assert engine.stats()["writes_in_flight"] == 1
            assert engine.lookup(prompt(1, 8)) == 0
        require_rest(engine)
        assert engine.lookup(prompt(1, 8)) == 8


def test_a_chunk_on_its_way_is_not_stored_again(oracle: Oracle) -> None:
    with oracle.engine(CHUNK, pages=LAYERS) as engine:
        oracle.compute(prompt(1, 8), run_slots(0, 8))
        with held_completions(engine):
            for _ in range(2):
                engine.store(prompt(1, 8), slot_mapping=run_slots(0, 8))
            assert "stores_refused" not in engine.stats()
        require_rest(engine)


@pytest.mark.parametrize("taken", range(1, LAYERS + 1))
def test_what_was_given_up_can_be_stored_again_though_its_transfers_have_not_ended(
    oracle: Oracle, taken: int
) -> None:
    with oracle.engine(CHUNK) as engine:
        oracle.compute(prompt(1, 16), run_slots(0, 16))
        with held_completions(engine):
            take(engine.store_layer(prompt(1, 16), slot_mapping=run_slots(0, 16)), taken)
            engine.store(prompt(1, 16), slot_mapping=run_slots(0, 16))
            assert engine.stats()["page_references"] == 4 * LAYERS
        require_rest(engine)
        assert engine.lookup(prompt(1, 16)) == 16


# Wrong use.


WRONG_REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "text as tokens": ({"tokens": "abcdefgh"}, "got str"),
    "fractions as tokens": ({"tokens": torch.zeros(8)}, "float32"),
    "tokens in two dimensions": ({"tokens": np.zeros((2, 4), int)}, "shape"),
    "a slot too few": ({"slot_mapping": run_slots(0, 7)}, "8 tokens"),
    "a slot too high": ({"slot_mapping": run_slots(121, 8)}, "slot 128 is out of range: slots are 0 to 127"),
    "a slot below none": ({"slot_mapping": [-2, *range(7)]}, "slot -2"),
    "a slot twice": ({"slot_mapping": [0, 1, 2, 3, 4, 5, 6, 3]}, "slot 3 is given to two tokens"),
    "slots that are no whole numbers": ({"slot_mapping": torch.arange(8.0)}, "whole numbers"),
    "no slots": ({"slot_mapping": None}, "whole numbers"),
    "a mask too long": ({"mask": [True] * 9}, "8 tokens"),
    "a mask of numbers": ({"mask": [1] * 8}, "must be bool"),
    "a mask with a hole": ({"mask": [True, False] * 4}, "leading part"),
    "a text as salts": ({"salts": "lora"}, "list or tuple"),
    "a number as salt": ({"salts": [1]}, "list or tuple"),
}


@pytest.mark.parametrize("name", WRONG_REQUESTS)
def test_a_wrong_request_is_refused_at_the_call_and_leaves_nothing(oracle: Oracle, name: str) -> None:
    wrong, text = WRONG_REQUESTS[name]
    arguments: dict[str, Any] = {"tokens": prompt(1, 8), "slot_mapping": run_slots(0, 8)} | wrong
    with oracle.engine(CHUNK) as engine:
        for call in (engine.retrieve_layer, engine.store_layer):
            with pytest.raises(RequestError, match=text):
                call(**arguments)
        with pytest.raises(RequestError, match=text):
            engine.retrieve_batch([Request(prompt(2, 8), run_slots(8, 8)), Request(**arguments)])
        require_rest(engine)
        oracle.check()


def test_slots_and_masks_may_be_device_tensors(oracle: Oracle, device: torch.device) -> None:
    with oracle.engine(CHUNK) as engine:
        store(oracle, engine, prompt(1, 8), run_slots(0, 8))
        slots = torch.arange(64, 72, device=device)
        mask = torch.tensor([False] * 3 + [True] * 5, device=device)
        loaded = engine.retrieve(torch.tensor(prompt(1, 8), device=device), mask, slot_mapping=slots)
        assert loaded.device.type == "cpu"
        assert torch.equal(loaded, mask.cpu())
        oracle.expect(prompt(1, 8), run_slots(64, 8), loaded)
        oracle.check()


def test_other_caches_than_the_registered_ones_are_refused(oracle: Oracle) -> None:
    with oracle.engine(CHUNK) as engine:
        arguments: Any = {"tokens": prompt(1, 8), "slot_mapping": run_slots(0, 8)}
        others = {name: t.clone() for name, t in oracle.kvcaches.items()}
        with pytest.raises(LayoutError, match="make an engine for each"):
            engine.retrieve_layer(**arguments, kvcaches=others)
        assert not engine.retrieve(**arguments, kvcaches=oracle.kvcaches).any()


def create(oracle: Oracle, config: Config, **arguments: Any) -> CacheEngine:
    arguments = {"metadata": oracle.metadata, "platform": oracle.platform} | arguments
    return CacheEngine.create(
        config, kvcaches=oracle.kvcaches, layout_hints={"block_size": oracle.dims.block_size}, **arguments
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"local_disk": "/not/there", "max_local_disk_size": 1.0}, "local_disk: '/not/there' cannot be used"),
        ({"remote_url": "s3://bucket"}, "no tier for s3://...; known are"),
        ({"max_local_cpu_size": 1 / 2**20}, "one chunk of one layer needs"),
    ],
    ids=["a folder that is not there", "a remote tier of no kind", "a pool without room for a page"],
)
def test_settings_that_cannot_work_are_refused_at_the_start(
    oracle: Oracle, settings: dict[str, Any], text: str
) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match=text):
        create(oracle, Config(chunk_size=CHUNK, **settings))
    assert threading.active_count() == before


def test_caches_of_another_device_type_are_refused(oracle: Oracle) -> None:
    name = oracle.platform.name

    class Elsewhere:
        """A platform of another device type."""

        name = device_type = "elsewhere"
        features = oracle.platform.features

    with pytest.raises(LayoutError, match=rf"the platform is 'elsewhere': name the platform '{name}'"):
        create(oracle, Config(), platform=Elsewhere())


def test_caches_on_a_device_that_no_platform_serves_are_refused_by_its_name() -> None:
    caches = {f"layer_{i}": torch.empty(2, 16, 4, 2, 3, device="meta") for i in range(LAYERS)}
    metadata = CacheMetadata("toy", LAYERS, 2, 3, torch.float32)
    with pytest.raises(ValueError, match="no platform for device 'meta'; known platforms: musa, xpu, cuda,"):
        CacheEngine.create(Config(), metadata, caches, layout_hints={"block_size": 4})


def test_metadata_with_other_heads_than_the_caches_is_refused(oracle: Oracle) -> None:
    metadata = CacheMetadata("toy", LAYERS, 5, 3, torch.float32)
    with pytest.raises(LayoutError, match="layer_0"):
        create(oracle, Config(), metadata=metadata)


def test_requests_of_one_batch_may_not_load_into_one_slot(oracle: Oracle) -> None:
    requests = [Request(prompt(1, 8), run_slots(0, 8)), Request(prompt(2, 8), run_slots(7, 8))]
    with oracle.engine(CHUNK) as engine:
        with pytest.raises(RequestError, match="slot 7 is given to two tokens"):
            engine.retrieve_batch(requests)
        require_rest(engine)


def test_where_blocks_are_opaque_a_store_may_begin_inside_one(
    platform: Platform, device: torch.device
) -> None:
    oracle = Oracle(platform, device, "opaque", Dims(blocks=32))
    with oracle.engine(CHUNK) as engine:
        oracle.compute(prompt(1, 16), run_slots(0, 16))
        engine.store(prompt(1, 16), [i >= 3 for i in range(16)], slot_mapping=run_slots(0, 16))
        require_rest(engine)
        assert engine.retrieve(prompt(1, 16), slot_mapping=run_slots(64, 16)).all()
        oracle.expect(prompt(1, 16), run_slots(64, 16))
        oracle.check()
        with pytest.raises(RequestError, match="whole blocks"):
            engine.retrieve(prompt(1, 16), [i >= 3 for i in range(16)], slot_mapping=run_slots(64, 16))


# What is stored where it does not all fit.


def test_a_prompt_larger_than_memory_leaves_its_beginning_and_no_neighbour_is_dragged_along(
    oracle: Oracle,
) -> None:
    long, short = prompt(1, 40), prompt(2, 16)
    requests = [Request(short, run_slots(0, 16)), Request(long, run_slots(32, 40))]
    with oracle.engine(CHUNK, pages=4 * LAYERS) as engine:
        for request in requests:
            oracle.compute(request.tokens, request.slot_mapping)
        list(engine.store_batch(requests))
        require_rest(engine)
        assert [engine.lookup(tokens) for tokens in (short, long)] == [16, 16]
        assert (engine.stats()["stores_refused"], engine.stats()["chunks_refused"]) == (1, 3)
        *_, masks = engine.retrieve_batch(
            [Request(short, run_slots(80, 16)), Request(long[:16], run_slots(96, 16))]
        )
        assert all(mask.all() for mask in masks)
        oracle.expect(short, run_slots(80, 16))
        oracle.expect(long[:16], run_slots(96, 16))
        oracle.check()


def test_memory_held_by_loads_is_there_for_stores_as_soon_as_they_have_ended(oracle: Oracle) -> None:
    """Nobody has to look anything up in between."""
    with oracle.engine(CHUNK, pages=2 * LAYERS) as engine:
        store(oracle, engine, prompt(1, 16), run_slots(0, 16))
        steps = engine.retrieve_layer(prompt(1, 16), slot_mapping=run_slots(64, 16))
        next(steps)
        store(oracle, engine, prompt(2, 16), run_slots(0, 16))
        assert engine.stats()["chunks_refused"] == 2
        steps.close()
        assert engine.flush()
        store(oracle, engine, prompt(2, 16), run_slots(0, 16))
        assert engine.stats()["chunks_refused"] == 2
        assert engine.lookup(prompt(2, 16)) == 16


# What the keys rest on.


class Other(Oracle):
    """The same with something else in its metadata."""

    def __init__(self, *arguments: Any, **changes: Any) -> None:
        super().__init__(*arguments)
        self._changes = changes

    @property
    def metadata(self) -> CacheMetadata:
        return replace(super().metadata, **self._changes)


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str, int]] = {
    "model": ({}, {"model": "another"}, "vllm_2bnhd", CHUNK),
    "revision": ({}, {"revision": "2"}, "vllm_2bnhd", CHUNK),
    "rope": ({}, {"rope": "theta 500000"}, "vllm_2bnhd", CHUNK),
    "dtype": ({}, {"dtype": torch.float16}, "vllm_2bnhd", CHUNK),
    "tp_size": ({}, {"tp_size": 2}, "vllm_2bnhd", CHUNK),
    "tp_rank": ({}, {"tp_size": 2, "tp_rank": 1}, "vllm_2bnhd", CHUNK),
    "pp_size": ({}, {"pp_size": 2}, "vllm_2bnhd", CHUNK),
    "pp_rank": ({}, {"pp_size": 2, "pp_rank": 1}, "vllm_2bnhd", CHUNK),
    "num_layers": ({"layers": LAYERS + 1}, {}, "vllm_2bnhd", CHUNK),
    "num_kv_heads": ({"heads": 1}, {}, "vllm_2bnhd", CHUNK),
    "head_size": ({"head_size": 4}, {}, "vllm_2bnhd", CHUNK),
    "use_mla": ({}, {}, "vllm_mla", CHUNK),
    "dtype of the caches": ({"dtype": torch.float16}, {}, "vllm_2bnhd", CHUNK),
    "page format": ({}, {}, "opaque", CHUNK),
    "chunk size": ({}, {}, "vllm_2bnhd", 4),
}


@pytest.mark.parametrize("name", OTHERS)
def test_an_engine_that_differs_in_one_thing_finds_nothing_of_another(
    platform: Platform, device: torch.device, name: str
) -> None:
    dims, metadata, form, chunk_size = OTHERS[name]
    tier = MemoryTier()
    # Its neighbour in the same group: a rank differs from the rank before, not from another size.
    base = {key: value for key, value in metadata.items() if key != name} if "rank" in name else {}
    store_in(Other(platform, device, "vllm_2bnhd", Dims(blocks=32), **base), tier, [prompt(1, 16)])
    other = Other(platform, device, form, Dims(blocks=32, **dims), **metadata)
    with other.engine(chunk_size, tiers=[tier]) as engine:
        assert engine.lookup(prompt(1, 16)) == 0
        assert not engine.retrieve(prompt(1, 16), slot_mapping=run_slots(0, 16)).any()
        other.check()


def test_every_field_of_the_metadata_is_among_those_that_make_a_difference() -> None:
    # What is stored cannot be said otherwise than the caches are.
    assert {field.name for field in fields(CacheMetadata)} - {"kv_dtype"} <= OTHERS.keys()


@pytest.mark.parametrize("form", ["vllm_b2nhd", "vllm_bhn2d", "padded"])
def test_an_engine_that_keeps_the_same_bytes_otherwise_finds_them(
    platform: Platform, device: torch.device, form: str
) -> None:
    tier = MemoryTier()
    store_in(Oracle(platform, device, dims=Dims(blocks=32)), tier, [prompt(1, 16)])
    other = Oracle(platform, device, form, Dims(blocks=16, block_size=8))
    with other.engine(CHUNK, tiers=[tier], prefetch_layers=0) as engine:
        assert engine.lookup(prompt(1, 16)) == 16


# What it costs.


def test_events_are_used_again_and_none_is_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU only: freed, a torch.cuda.Event leaves weak references dangling (pytorch PR 183403)."""
    platform = open_platform("cpu")
    oracle = Oracle(platform, platform.current_device(), dims=Dims(blocks=32))
    events: weakref.WeakSet[Any] = weakref.WeakSet()
    new_event = platform.new_event

    def counted(*arguments: Any, **settings: Any) -> Any:
        event = new_event(*arguments, **settings)
        events.add(event)
        return event

    monkeypatch.setattr(platform, "new_event", counted)
    with oracle.engine(CHUNK) as engine:
        alive = []
        for number in range(4):
            store(oracle, engine, prompt(number, 16), run_slots(0, 16))
            for taken in (None, *range(LAYERS + 2)):
                take(engine.retrieve_layer(prompt(number, 16), slot_mapping=run_slots(64, 16)), taken)
            with failing_device(engine, "wait for layer 1"):
                list(engine.retrieve_layer(prompt(number, 16), slot_mapping=run_slots(64, 16)))
            require_rest(engine)
            gc.collect()
            alive.append(len(events))
        assert alive == alive[:1] * 4
    del engine
    gc.collect()
    assert len(events) == 0


def calls_within(work: Callable[[], object]) -> Counter[str]:
    """How often `work` calls what, in lwkv's own code above the platform and from there, on this thread."""
    calls: Counter[str] = Counter()
    root = str(Path(lwkv.__file__).parent)

    def counts(frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        return file.startswith(root) and "platforms" not in file

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and counts(frame):
            calls[frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name] += 1
        elif event == "c_call" and counts(frame):
            calls[getattr(argument, "__qualname__", str(argument))] += 1

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("storing", [False, True], ids=["retrieve", "store"])
def test_the_host_s_work_for_a_layer_is_the_same_for_any_number_of_chunks(
    platform: Platform, device: torch.device, storing: bool
) -> None:
    counts = []
    for num_chunks in (2, 12):
        oracle = Oracle(platform, device, dims=Dims(layers=6, blocks=64))
        tokens, slots = prompt(1, num_chunks * CHUNK), run_slots(0, num_chunks * CHUNK)
        with oracle.engine(CHUNK, 6 * 12, staging_bytes=1 << 20) as engine:
            if not storing:
                store(oracle, engine, tokens, slots)
            steps = (engine.store_layer if storing else engine.retrieve_layer)(tokens, slot_mapping=slots)
            for _ in range(4):
                next(steps)
            counts.append(calls_within(lambda steps=steps: next(steps)))
            steps.close()
    assert sum(counts[0].values()) > 5
    assert counts[0] == counts[1]


# A long run.


def test_a_long_random_run_over_a_tiny_pool_keeps_every_byte_right(
    platform: Platform, device: torch.device
) -> None:
    oracle = Oracle(platform, device, dims=Dims(blocks=48))
    rng = np.random.default_rng(7)
    prompts = [prompt(0, 16 * (i % 2)) + prompt(i + 1, int(rng.integers(1, 40))) for i in range(8)]
    with oracle.engine(CHUNK, pages=LAYERS * 7, staging_bytes=8 * oracle.page_bytes(CHUNK)) as engine:
        for _ in range(300 if device.type == "cpu" else 100):
            picked = rng.choice(len(prompts), rng.integers(1, 4), replace=False)
            run_step(oracle, engine, rng, [prompts[i] for i in picked])
        require_rest(engine)
        stats = engine.stats()
        assert stats["chunks_evicted"] > 50
        assert stats["tokens_retrieved"] > 500
        assert "load_failures" not in stats


def run_step(
    oracle: Oracle, engine: CacheEngine, rng: np.random.Generator, prompts: Sequence[list[int]]
) -> None:
    """Retrieve what is cached, compute the rest, store; the blocks were dealt out at random."""
    dims = oracle.dims
    blocks = rng.permutation(dims.blocks)
    requests = []
    for tokens in prompts:
        needed = -(-len(tokens) // dims.block_size)
        own, blocks = blocks[:needed], blocks[needed:]
        slots = (own[:, None] * dims.block_size + np.arange(dims.block_size)).ravel()[: len(tokens)]
        local = int(rng.integers(0, len(tokens) + 1)) if rng.random() < 0.4 else 0
        oracle.compute(tokens[:local], slots[:local])
        requests.append(Request(tokens, slots, np.arange(len(tokens)) >= local))
    promised, *_, masks = engine.retrieve_batch(requests, sync=bool(rng.integers(2)))
    for request, mask, count in zip(requests, masks, promised, strict=True):
        assert int(mask.sum()) == count
        oracle.expect(request.tokens, request.slot_mapping, mask)
        rest = request.mask & ~mask.numpy()
        oracle.compute(request.tokens, np.where(rest, request.slot_mapping, -1))
    oracle.check()
    whole = [Request(request.tokens, request.slot_mapping) for request in requests]
    steps = engine.store_batch(whole)
    for _ in range(int(rng.integers(1, LAYERS + 3)) if rng.random() < 0.2 else LAYERS + 1):
        next(steps, None)
    steps.close()
    if rng.random() < 0.5:
        require_rest(engine)
