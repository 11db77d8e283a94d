"""A fixed number of steps, exact bytes and nothing held at rest, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import torch
from engine.rig import CHUNK, LAYERS, MOST_TOKENS, failing_device, prompt, require_closed, take
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from oracle import Dims, MemoryTier, Oracle, require_rest, run_slots

from lwkv.engine import CacheEngine, Request
from lwkv.pipeline import prompt_keys
from lwkv.pipeline.prompt_keys import FEW_CHUNKS
from lwkv.platforms import Platform
from lwkv.storage import Status

EVERY_PATH = settings(
    max_examples=min(60, settings.default.max_examples),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


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
    few_chunks: int = FEW_CHUNKS


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
    pages=st.sampled_from([LAYERS, 8, 64]),
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
    few_chunks=st.sampled_from([FEW_CHUNKS, 1]),
)
HIT = Case(
    (Share(24, 24, 0, False),), False, False, False, False, 64, 1, 1, 0, 2, True, None, None, None
)  # paged, single, all of it


@contextmanager
def start(case: Case, oracle: Oracle, tier: MemoryTier) -> Iterator[CacheEngine]:
    engine = oracle.engine(
        CHUNK,
        case.pages,
        tiers=[tier] if case.tier else [],
        staging_bytes=6 * case.staging_chunks * oracle.page_bytes(CHUNK),
        lookahead=case.lookahead,
        group_bytes=case.group_chunks * oracle.page_bytes(CHUNK),
        prefetch_layers=case.prefetch,
        save_unfull_chunk=case.partial,
        enable_blending=case.buffered,
    )
    with patch.object(prompt_keys, "FEW_CHUNKS", case.few_chunks), engine:
        yield engine


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
