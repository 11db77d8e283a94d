"""Chunks that come with their keys, and with slots that only the device knows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from oracle import Dims, MemoryTier, Oracle, require_rest, run_slots

from lwkv.engine import CacheEngine
from lwkv.errors import RequestError
from lwkv.keys import ChunkKey, LayerKey
from lwkv.platforms import Platform
from lwkv.request import KeyedChunks, Request
from lwkv.steps import LayerSteps
from lwkv.storage import Status

CHUNK = 8
TOKENS, MORE = list(range(100, 124)), list(range(200, 216))


@pytest.fixture
def oracle(platform: Platform, device: torch.device) -> Oracle:
    return Oracle(platform, device, "sglang_kv", Dims(blocks=32))


@pytest.fixture
def engine(oracle: Oracle) -> Iterator[CacheEngine]:
    with oracle.engine(CHUNK) as engine:
        yield engine


def keyed(engine: CacheEngine, name: bytes, slots: list[int]) -> KeyedChunks:
    numbers = range(len(slots) // CHUNK)
    keys = [ChunkKey(engine.namespace, name.ljust(15) + bytes([number])) for number in numbers]
    return KeyedChunks(keys, torch.tensor(slots, device=engine.connector.device))


def test_chunks_are_stored_and_loaded_under_the_keys_they_came_with(
    oracle: Oracle, engine: CacheEngine
) -> None:
    came, into = run_slots(0, 24, backwards=True), run_slots(40, 24)
    oracle.compute(TOKENS, came)
    for _ in engine.store_batch([keyed(engine, b"a", came)]):
        pass
    assert engine.flush()
    assert engine.lookup(TOKENS) == 0
    *_, masks = engine.retrieve_batch([keyed(engine, b"a", into)])
    assert [mask.tolist() for mask in masks or []] == [[True] * 24]
    oracle.expect(TOKENS, into)
    oracle.check()


def test_several_share_a_transfer_and_what_is_known_is_not_moved_again(
    oracle: Oracle, engine: CacheEngine
) -> None:
    one, other = run_slots(0, 24), run_slots(24, 16)
    oracle.compute(TOKENS, one)
    oracle.compute(MORE, other)
    for batch in ([keyed(engine, b"b", other)], [keyed(engine, b"a", one), keyed(engine, b"b", other)]):
        for _ in engine.store_batch(batch):
            pass
    assert engine.flush()
    assert engine.stats()["chunks"] == 5
    steps = LayerSteps(engine)
    steps.begin([keyed(engine, b"b", run_slots(64, 16)), keyed(engine, b"a", run_slots(80, 24))], ())
    assert steps.start_load_kv() == [16, 24]
    for layer in range(engine.num_layers):
        steps.wait_for_layer_load(layer)
    assert all(mask.all() for mask in steps.wait_for_save().loaded)
    oracle.expect(MORE, run_slots(64, 16))
    oracle.expect(TOKENS, run_slots(80, 24))
    oracle.check()
    require_rest(engine)


def test_a_part_of_what_is_given_away_may_be_known(oracle: Oracle, engine: CacheEngine) -> None:
    slots = run_slots(0, 24)
    oracle.compute(TOKENS, slots)
    for count in (8, 24):
        for _ in engine.store_batch([keyed(engine, b"a", slots[:count])]):
            pass
    assert engine.flush()
    *_, masks = engine.retrieve_batch([keyed(engine, b"a", run_slots(40, 24))])
    assert [bool(mask.all()) for mask in masks or []] == [True]
    oracle.expect(TOKENS, run_slots(40, 24))
    oracle.check()


def test_kernels_wait_for_the_slots_that_are_left_when_a_chunk_does_not_arrive(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, came, into = MemoryTier(), run_slots(0, 24), run_slots(40, 24)
    oracle.compute(TOKENS, came)
    with oracle.engine(CHUNK, tiers=[tier]) as before:
        for _ in before.store_batch([keyed(before, b"a", came)]):
            pass
        assert before.flush()
    with oracle.engine(CHUNK, tiers=[tier], lookahead=0) as engine:
        chunks = keyed(engine, b"a", into)
        lost = LayerKey(chunks.keys[1], 1)
        tier.fails = lambda key: Status.MISS if key == lost else Status.OK
        calls: list[str] = []
        for name in ("drop_chunks", "_wait_for_readers", "_scatter"):
            call = getattr(engine.connector.loader, name)
            monkeypatch.setattr(
                engine.connector.loader, name, lambda *a, name=name, call=call: (calls.append(name), call(*a))
            )
        *_, masks = engine.retrieve_batch([chunks])
        assert [mask.tolist() for mask in masks or []] == [[True] * 8 + [False] * 8 + [True] * 8]
        after = calls[calls.index("drop_chunks") :]
        assert after[:3] == ["drop_chunks", "_wait_for_readers", "_scatter"]
        assert calls.count("_wait_for_readers") == 2
        require_rest(engine)


def test_slots_of_several_are_waited_for_also_where_nothing_else_is(
    oracle: Oracle, engine: CacheEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[object] = []
    wait = engine.connector.saver._wait_for_writers
    monkeypatch.setattr(
        engine.connector.saver, "_wait_for_writers", lambda save: (waits.append(save), wait(save))
    )
    one, other = run_slots(0, 24), run_slots(24, 16)
    oracle.compute(TOKENS, one)
    oracle.compute(MORE, other)
    for _ in engine.store_batch([keyed(engine, b"a", one), keyed(engine, b"b", other)], sync=False):
        pass
    assert engine.flush()
    assert waits
    require_rest(engine)


def test_slots_must_be_one_number_for_each_token(engine: CacheEngine) -> None:
    good = keyed(engine, b"a", run_slots(0, 16))
    for slots in (good.slots[:15], good.slots.int()):
        with pytest.raises(RequestError, match="slots is"):
            engine.store_batch([KeyedChunks(good.keys, slots)])


def test_slots_must_be_where_the_caches_are(engine: CacheEngine) -> None:
    good = keyed(engine, b"a", run_slots(0, 16))
    elsewhere = KeyedChunks(good.keys, good.slots.to("meta"))
    for call in (engine.store_batch, engine.retrieve_batch):
        with pytest.raises(RequestError, match=r"slots is on meta; it must be on \w+"):
            call([elsewhere])


def test_a_batch_is_of_one_kind_of_request(engine: CacheEngine) -> None:
    steps = LayerSteps(engine)
    with pytest.raises(RequestError):
        steps.begin([keyed(engine, b"a", run_slots(0, 16)), Request(TOKENS, run_slots(24, 24))], ())


def test_opaque_blocks_cannot_be_moved_by_keys(platform: Platform, device: torch.device) -> None:
    oracle = Oracle(platform, device, "opaque", Dims(blocks=8))
    with oracle.engine(CHUNK) as engine, pytest.raises(RequestError, match="opaque"):
        engine.store_batch([keyed(engine, b"a", run_slots(0, 16))])
