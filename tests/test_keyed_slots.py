"""Chunks that come with their keys, and with slots on the host of which some may be missing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from oracle import Dims, Oracle, require_rest, run_slots

from lwkv.engine import CacheEngine
from lwkv.errors import RequestError
from lwkv.keys import ChunkKey
from lwkv.platforms import Platform
from lwkv.request import KeyedSlots, Request
from lwkv.steps import LayerSteps
from lwkv.transfer import NO_SLOT

CHUNK = 8
TOKENS = list(range(100, 124))


@pytest.fixture(params=["vllm_2bnhd", "opaque"])
def oracle(platform: Platform, device: torch.device, request: pytest.FixtureRequest) -> Oracle:
    return Oracle(platform, device, request.param, Dims(blocks=32))


@pytest.fixture
def engine(oracle: Oracle) -> Iterator[CacheEngine]:
    with oracle.engine(CHUNK) as engine:
        yield engine


def keyed(engine: CacheEngine, slots: list[int], first: int = 0, name: bytes = b"a") -> KeyedSlots:
    numbers = range(len(slots) // CHUNK)
    keys = [ChunkKey(engine.namespace, bytes([number]) + name.ljust(15)) for number in numbers]
    return KeyedSlots(keys, np.array(slots), first)


def store(engine: CacheEngine, request: KeyedSlots) -> None:
    for _ in engine.store_batch([request]):
        pass
    assert engine.flush()


def test_chunks_are_loaded_under_the_keys_they_were_stored_under(oracle: Oracle, engine: CacheEngine) -> None:
    came, into = run_slots(0, 24), run_slots(40, 24)
    oracle.compute(TOKENS, came)
    store(engine, keyed(engine, came))
    assert engine.lookup(TOKENS) == 0
    *_, masks = engine.retrieve_batch([keyed(engine, into)])
    assert [mask.tolist() for mask in masks or []] == [[True] * 24]
    oracle.expect(TOKENS, into)
    oracle.check()
    require_rest(engine)


def test_tokens_that_the_engine_has_or_that_have_no_slot_are_not_written(
    oracle: Oracle, engine: CacheEngine
) -> None:
    came, into = run_slots(0, 24), run_slots(40, 24)
    oracle.compute(TOKENS, came)
    store(engine, keyed(engine, came))
    wanted = [False] * 4 + [True] * 8 + [False] * 4 + [True] * 8
    into = [slot if i < 12 or i > 15 else NO_SLOT for i, slot in enumerate(into)]
    *_, masks = engine.retrieve_batch([keyed(engine, into, first=4)])
    assert [mask.tolist() for mask in masks or []] == [wanted]
    oracle.expect(TOKENS, into, where=wanted)
    oracle.check()


def test_a_chunk_that_lacks_a_slot_is_not_stored(oracle: Oracle, engine: CacheEngine) -> None:
    slots = run_slots(0, 24)
    oracle.compute(TOKENS, slots)
    store(engine, keyed(engine, [*slots[:8], *[NO_SLOT] * 4, *slots[12:]]))
    assert engine.stats()["chunks"] == 2


def test_what_does_not_fit_is_refused(engine: CacheEngine) -> None:
    good = keyed(engine, run_slots(0, 24))
    for wrong, text in (
        (KeyedSlots(good.keys, good.slots[:-1]), r"slots is int64 \(23,\)"),
        (KeyedSlots(good.keys, good.slots.astype(np.float32)), "slots is float32"),
        (KeyedSlots(good.keys, good.slots, first=25), "first is 25; allowed: 0 to 24"),
        (keyed(engine, [*run_slots(0, 16), *run_slots(0, 8)]), "is given to two tokens of a request"),
        (keyed(engine, run_slots(4 * 32 - 16, 24)), "out of range"),
    ):
        with pytest.raises(RequestError, match=text):
            engine.store_batch([wrong])
        with pytest.raises(RequestError, match=text):
            engine.retrieve_batch([wrong])


def test_slots_may_be_shared_by_the_same_chunks_alone(engine: CacheEngine) -> None:
    one, same = keyed(engine, run_slots(0, 16)), keyed(engine, run_slots(0, 24))
    assert engine.retrieve_batch([one, same])
    with pytest.raises(RequestError, match="a prefix that is the same in both"):
        engine.retrieve_batch([one, keyed(engine, run_slots(0, 16), name=b"b")])


def test_what_is_stored_may_share_slots_where_different_chunks_begin_alike(
    oracle: Oracle, engine: CacheEngine
) -> None:
    """Two prompts whose second chunks have their first four tokens in common."""
    one, other = run_slots(0, 16), [*run_slots(0, 12), *run_slots(40, 4)]
    oracle.compute(TOKENS[:16], one)
    oracle.compute(TOKENS[:16], other)
    for _ in engine.store_batch([keyed(engine, one), keyed(engine, other, name=b"b")]):
        pass
    assert engine.flush()
    assert engine.stats()["chunks"] == 4
    with pytest.raises(RequestError, match="is given to two tokens of a request"):
        engine.store_batch([keyed(engine, one), keyed(engine, [*one[:8], *one[:8]], name=b"c")])


def test_one_batch_has_one_kind_of_request(engine: CacheEngine) -> None:
    with pytest.raises(RequestError, match="pass a list of"):
        engine.store_batch([keyed(engine, run_slots(0, 8)), Request(TOKENS, run_slots(8, 24))])


def test_stores_of_a_step_can_be_given_up_after_its_loads(oracle: Oracle, engine: CacheEngine) -> None:
    slots = run_slots(0, 24)
    oracle.compute(TOKENS, slots)
    steps = LayerSteps(engine)
    steps.begin([keyed(engine, run_slots(40, 24), name=b"none")], [keyed(engine, slots)])
    steps.start_load_kv()
    for layer in range(engine.num_layers):
        steps.wait_for_layer_load(layer)
        steps.save_kv_layer(layer)
    assert [int(mask.sum()) for mask in steps.wait_for_loads()] == [0]
    result = steps.wait_for_save(keep=False)
    assert not result.stored
    assert engine.flush()
    assert engine.stats()["chunks"] == 0
    require_rest(engine)
