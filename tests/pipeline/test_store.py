"""The cursor over a store's layers."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from oracle import Dims, Oracle, require_rest, run_slots

from lwkv.engine import CacheEngine, Request
from lwkv.pipeline import prompt_keys, store
from lwkv.platforms import Platform
from lwkv.storage import HostTier

LAYERS = 4
TOKENS = list(range(24))
FROM, INTO = run_slots(0, 24), run_slots(32, 24)


@pytest.fixture
def oracle(platform: Platform, device: torch.device) -> Oracle:
    return Oracle(platform, device, dims=Dims(layers=LAYERS))


@pytest.fixture
def engine(oracle: Oracle) -> Iterator[CacheEngine]:
    with oracle.engine(8) as engine:
        oracle.compute(TOKENS, FROM)
        yield engine
        require_rest(engine)


def require_stored(oracle: Oracle, engine: CacheEngine) -> None:
    assert engine.flush()
    mask = engine.retrieve(TOKENS, slot_mapping=INTO)
    assert mask.all()
    oracle.expect(TOKENS, INTO, mask)
    oracle.check()


@pytest.mark.parametrize("layers", [[], [0], [0, 1, 2, 3], [2], [1, 1, 0, 3], [3, 3]], ids=str)
def test_whatever_layers_it_was_advanced_to_all_are_stored_once(
    oracle: Oracle, engine: CacheEngine, layers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, save_layers = [], engine.connector.saver.save_layers
    monkeypatch.setattr(
        engine.connector.saver, "save_layers", lambda save, n: (saved.extend(n), save_layers(save, n))
    )
    storing = engine.storing([Request(TOKENS, FROM)])
    for layer in layers:
        storing.advance(layer)
        assert storing.next_layer == max(layers[: layers.index(layer) + 1]) + 1
    storing.commit()
    assert storing.next_layer == LAYERS
    require_stored(oracle, engine)
    assert saved == list(range(LAYERS))


@pytest.mark.parametrize("reached", [None, 0, LAYERS - 1])
def test_one_that_is_dropped_stores_nothing_and_gives_everything_back_at_once(
    engine: CacheEngine, reached: int | None
) -> None:
    storing = engine.storing([Request(TOKENS, FROM)])
    if reached is not None:
        storing.advance(reached)
        assert engine.stats()["writes_in_flight"] == 3
    gc.disable()
    try:
        del storing
        require_rest(engine)
    finally:
        gc.enable()
    assert engine.lookup(TOKENS) == 0


@pytest.mark.parametrize("committed", [True, False])
def test_where_the_wait_for_the_device_fails_nothing_but_the_pages_is_held(
    oracle: Oracle, committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(save: object) -> None:
        raise RuntimeError("the device is lost, says the test")

    with oracle.engine(8) as engine:
        oracle.compute(TOKENS, FROM)
        engine.store(TOKENS[:8], slot_mapping=FROM[:8])
        assert engine.flush()
        with monkeypatch.context() as broken:
            broken.setattr(engine.connector.saver, "end_save", fail)
            storing = engine.storing([Request(TOKENS, FROM)])
            storing.advance(0)
            (storing.commit if committed else storing.close)()
            assert engine.flush()
        stats = engine.stats()
        assert (stats["pins"], stats["writes_in_flight"], stats["transfer_errors"]) == (0, 0, 1)
        assert engine.lookup(TOKENS) == 8
        assert stats["page_references"] == 3 * LAYERS, "the device may still write to those"


OTHER = [*TOKENS[:16], *range(50, 58)]


@pytest.fixture
def slow_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of three chunks take long enough to queue the first two layers before they are made."""
    monkeypatch.setattr(prompt_keys, "FEW_CHUNKS", 2)
    monkeypatch.setattr(store, "UNNAMED_LAYERS", 2)


@pytest.fixture
def calls(engine: CacheEngine, slow_keys: None, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The layers that were saved, and of how many tokens keys were made, in order."""
    made: list[object] = []
    saver, chunk_keys = engine.connector.saver, prompt_keys.chunk_keys
    save_layers = saver.save_layers
    monkeypatch.setattr(saver, "save_layers", lambda save, n: (made.append(n), save_layers(save, n)))
    monkeypatch.setattr(
        prompt_keys, "chunk_keys", lambda ids, *rest: (made.append(len(ids)), chunk_keys(ids, *rest))[1]
    )
    return made


@pytest.mark.parametrize("layers", [[], [0], [0, 1, 2, 3], [2], [3, 3]], ids=str)
def test_the_first_layers_of_a_new_prompt_are_queued_before_its_keys_are_made(
    oracle: Oracle, engine: CacheEngine, calls: list[object], layers: list[int]
) -> None:
    storing = engine.storing([Request(TOKENS, FROM)])
    for layer in layers:
        storing.advance(layer)
    storing.commit()
    named = calls.index(24)
    assert calls[0] == 8
    assert [layer for saved in calls[1:named] for layer in saved] == [0, 1]  # type: ignore[attr-defined]
    assert [layer for saved in calls[named + 1 :] for layer in saved] == [2, 3]  # type: ignore[attr-defined]
    require_stored(oracle, engine)
    require_rest(engine)


@pytest.mark.parametrize("known", [TOKENS, TOKENS[:8], OTHER], ids=["all", "its first chunk", "some of it"])
def test_what_is_known_of_a_prompt_is_not_moved_again(
    oracle: Oracle, engine: CacheEngine, calls: list[object], known: list[int]
) -> None:
    oracle.compute(known, INTO[: len(known)])
    engine.store(known, slot_mapping=INTO[: len(known)])
    assert engine.flush()
    engine.keys(range(100, 100 + 24 * prompt_keys.NUM_PROMPTS))  # others are remembered
    before = engine.stats()["tokens_stored"]
    calls.clear()
    engine.store(TOKENS, slot_mapping=FROM)
    require_stored(oracle, engine)
    kept = 24 if known == TOKENS else 8 if known == TOKENS[:8] else 16
    assert engine.stats()["tokens_stored"] - before == 24 - kept
    require_rest(engine)


def test_chunks_behind_one_that_is_lost_are_not_moved_again(
    oracle: Oracle, engine: CacheEngine, calls: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.store(TOKENS, slot_mapping=FROM)
    assert engine.flush()
    host = engine.parts().storage.host
    assert isinstance(host, HostTier)
    assert host.remove(engine.keys(TOKENS)[:1])
    monkeypatch.setattr(prompt_keys, "NUM_PROMPTS", 0)
    engine.keys([])  # nothing is remembered
    before = engine.stats()["tokens_stored"]
    engine.store(TOKENS, slot_mapping=FROM)
    require_stored(oracle, engine)
    assert engine.stats()["tokens_stored"] - before == 8


@pytest.mark.parametrize("other", [TOKENS, OTHER], ids=["all", "some"])
@pytest.mark.parametrize("committed", [True, False])
def test_what_another_store_claims_before_the_keys_are_made_is_that_one_s(
    oracle: Oracle, engine: CacheEngine, slow_keys: None, other: list[int], committed: bool
) -> None:
    oracle.compute(other, INTO)
    storing = engine.storing([Request(TOKENS, FROM)])
    storing.advance(0)
    engine.store(other, slot_mapping=INTO)
    storing.advance(2)
    (storing.commit if committed else storing.close)()
    require_rest(engine)
    assert engine.lookup(other) == 24
    assert engine.lookup(TOKENS) == (24 if committed or other == TOKENS else 16)
    assert engine.stats()["tokens_stored"] == (24 if other == TOKENS or not committed else 32)
    for tokens in (TOKENS, other):
        mask = engine.retrieve(tokens, slot_mapping=INTO)
        oracle.expect(tokens, INTO, mask)
        oracle.check()


def test_one_that_is_given_up_before_its_keys_are_made_holds_nothing(
    oracle: Oracle, engine: CacheEngine, slow_keys: None
) -> None:
    storing = engine.storing([Request(TOKENS, FROM)])
    storing.advance(0)
    assert engine.stats()["writes_in_flight"] == 0, "nothing is claimed"
    assert engine.stats()["pages_in_use"] == 3 * LAYERS
    storing.close()
    require_rest(engine)
    engine.store(TOKENS, slot_mapping=FROM)
    require_stored(oracle, engine)


def test_where_there_is_no_room_for_all_of_a_new_prompt_its_first_chunks_are_stored(
    oracle: Oracle, slow_keys: None
) -> None:
    with oracle.engine(8, 2 * LAYERS) as engine:
        oracle.compute(TOKENS, FROM)
        engine.store(TOKENS, slot_mapping=FROM)
        require_rest(engine)
        assert engine.lookup(TOKENS) == 16
        mask = engine.retrieve(TOKENS, slot_mapping=INTO)
        oracle.expect(TOKENS, INTO, mask)
        oracle.check()
        assert engine.stats()["chunks_refused"] == 1
