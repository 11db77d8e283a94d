"""Engines that share an owner's memory: what one stores the others find, byte for byte."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.rig import CHUNK, prompt, require_closed, store
from oracle import Dims, MemoryTier, Oracle, require_rest, run_slots
from shared_host.owners import LONG_S, OwnerThread, owner_at
from shared_host.workers import freeze, kill, run_owner, start, thaw, wait_for

from lwkv.engine import CacheEngine
from lwkv.errors import ConfigError, RequestError
from lwkv.metadata import CacheMetadata
from lwkv.platforms import Platform
from lwkv.platforms.cpu import CPU
from lwkv.request import KeyedSlots
from lwkv.shared_host.client.opening import open_node_memory
from lwkv.telemetry.counters import Counters

DIMS = Dims()
PAGES = 64
LENGTH = 3 * CHUNK


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "host.sock"


@pytest.fixture
def owner(path: Path) -> Iterator[OwnerThread]:
    with owner_at(path, PAGES) as owner:
        yield owner


@pytest.fixture
def oracle(platform: Platform, device: torch.device) -> Oracle:
    return Oracle(platform, device, dims=DIMS)


def engine_at(oracle: Oracle, path: Path, timeout_s: float = LONG_S, **settings: Any) -> CacheEngine:
    return oracle.engine(CHUNK, host_memory=str(path), host_timeout_s=timeout_s, **settings)


def load(oracle: Oracle, engine: CacheEngine, tokens: list[int]) -> int:
    """How many tokens were loaded; their bytes are right."""
    slots = run_slots(16, len(tokens))
    loaded = int(engine.retrieve(tokens, slot_mapping=slots).sum())
    oracle.expect(tokens[:loaded], slots[:loaded])
    oracle.check()
    oracle.zero(slots)
    return loaded


def test_what_one_engine_stores_is_a_hit_of_another(oracle: Oracle, owner: OwnerThread, path: Path) -> None:
    with engine_at(oracle, path) as one, engine_at(oracle, path) as other:
        store(oracle, one, prompt(1, LENGTH), run_slots(0, LENGTH))
        assert other.lookup(prompt(1, LENGTH)) == LENGTH
        assert load(oracle, other, prompt(1, LENGTH)) == LENGTH
        assert other.stats()["host_used_bytes"] == 9 * 4096
        require_closed(one)
        require_closed(other)


def test_a_load_announces_that_it_pins_before_all_else(
    oracle: Oracle, owner: OwnerThread, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_at(oracle, path) as engine:
        store(oracle, engine, prompt(1, LENGTH), run_slots(0, LENGTH))
        host, calls = engine.parts().storage.host, list[str]()
        for name in ("announce", "pin"):
            real = getattr(host, name)
            monkeypatch.setattr(host, name, lambda *a, r=real, n=name: (calls.append(n), r(*a))[1])
        assert load(oracle, engine, prompt(1, LENGTH)) == LENGTH
        assert calls == ["announce", "pin"]


@pytest.mark.parametrize("ends", ["never begun", "begun", "loaded", "refused"])
@pytest.mark.parametrize("is_shared", [True, False])
def test_chunks_that_were_pinned_before_a_load_are_given_back_however_it_ends(
    oracle: Oracle, owner: OwnerThread, path: Path, is_shared: bool, ends: str
) -> None:
    with engine_at(oracle, path) if is_shared else oracle.engine(CHUNK) as engine:
        store(oracle, engine, prompt(1, LENGTH), run_slots(0, LENGTH))
        host, names = engine.parts().storage.host, engine.keys(prompt(1, LENGTH))
        chunks, slots = host.pin(names), np.array(run_slots(16, LENGTH))
        if ends == "refused":
            with pytest.raises(RequestError):
                engine.retrieval([KeyedSlots(names, slots + (1 << 40))], pinned=[chunks])
            assert host.pins == 3, "they are the caller's still"
            host.unpin([chunk for chunk in chunks if chunk is not None])
        else:
            batch = engine.retrieval([KeyedSlots(names, slots)], pinned=[chunks])
            if ends != "never begun":
                assert batch.open() == [LENGTH]
            if ends == "loaded":
                assert batch.finish()[0].all()
                oracle.expect(prompt(1, LENGTH), slots)
                oracle.check()
            batch.close()
        require_rest(engine)


def test_a_load_of_pinned_chunks_of_which_none_is_there_does_not_keep_a_closed_engine_s_thread(
    oracle: Oracle,
) -> None:
    with oracle.engine(CHUNK) as engine:
        store(oracle, engine, prompt(1, LENGTH), run_slots(0, LENGTH))
        host, names = engine.parts().storage.host, engine.keys(prompt(1, LENGTH))
        pinned, slots = [None, *host.pin(names[1:])], np.array(run_slots(16, LENGTH))
        batch = engine.retrieval([KeyedSlots(names, slots)], pinned=[pinned])
        assert batch.open() == [0]
        batch.close()
        require_rest(engine)
        thread = engine.parts().completions
    thread.join(LONG_S)
    assert not thread._thread.is_alive()


def test_another_process_finds_what_was_stored_and_a_restarted_engine_finds_its_own(
    oracle: Oracle, owner: OwnerThread, path: Path
) -> None:
    def store_elsewhere() -> None:
        # On the CPU, whatever the others are on: a forked process cannot use their device.
        there = Oracle(CPU(), torch.device("cpu"), dims=DIMS)
        with engine_at(there, path) as engine:
            store(there, engine, prompt(1, LENGTH), run_slots(0, LENGTH))

    process = start(store_elsewhere)
    process.join(60)
    assert process.exitcode == 0
    oracle.rows(prompt(1, LENGTH), 0)  # numbered as in the other process
    for _ in range(2):
        with engine_at(oracle, path) as engine:
            assert load(oracle, engine, prompt(1, LENGTH)) == LENGTH
            require_rest(engine)


def test_the_prompt_used_longest_ago_is_evicted_from_its_end_whoever_stored_it(
    oracle: Oracle, path: Path
) -> None:
    with owner_at(path, 7 * 3), engine_at(oracle, path) as one, engine_at(oracle, path) as other:
        store(oracle, one, prompt(1, LENGTH), run_slots(0, LENGTH))
        store(oracle, other, prompt(2, LENGTH), run_slots(0, LENGTH))
        store(oracle, other, prompt(3, 2 * CHUNK), run_slots(0, 2 * CHUNK))
        assert [one.lookup(prompt(number, LENGTH)) for number in (1, 2, 3)] == [2 * CHUNK, LENGTH, 2 * CHUNK]
        assert one.stats()["chunks_evicted"] == 1
        require_rest(one)
        require_rest(other)


def test_what_is_brought_from_a_lower_tier_is_there_for_the_others(
    oracle: Oracle, owner: OwnerThread, path: Path
) -> None:
    tier = MemoryTier()
    with oracle.engine(CHUNK, tiers=[tier]) as engine:
        store(oracle, engine, prompt(1, LENGTH), run_slots(0, LENGTH))
    with engine_at(oracle, path, tiers=[tier]) as one, engine_at(oracle, path) as other:
        assert load(oracle, one, prompt(1, LENGTH)) == LENGTH
        assert one.flush()
        assert load(oracle, other, prompt(1, LENGTH)) == LENGTH
        require_rest(one)
        require_rest(other)


def test_a_load_under_way_ends_with_right_bytes_when_the_owner_dies_and_a_new_one_is_found(
    oracle: Oracle, path: Path
) -> None:
    owner = start(run_owner, path, PAGES)
    with engine_at(oracle, path) as engine:
        store(oracle, engine, prompt(1, LENGTH), run_slots(0, LENGTH))
        slots = run_slots(16, LENGTH)
        steps = engine.retrieve_layer(prompt(1, LENGTH), slot_mapping=slots)
        assert next(steps) == LENGTH
        next(steps)
        kill(owner)
        owner = start(run_owner, path, PAGES)
        *_, loaded = steps
        assert loaded.all()
        oracle.expect(prompt(1, LENGTH), slots)
        oracle.check()
        wait_for(lambda: engine.counts().get("host_memory_lost", 0) == 1)
        assert engine.lookup(prompt(1, LENGTH)) == 0

        def is_stored() -> bool:
            oracle.zero(run_slots(0, LENGTH))
            store(oracle, engine, prompt(2, LENGTH), run_slots(0, LENGTH))
            return engine.lookup(prompt(2, LENGTH)) == LENGTH

        wait_for(is_stored)
        oracle.zero(slots)
        assert load(oracle, engine, prompt(2, LENGTH)) == LENGTH
        require_rest(engine)
    kill(owner)


def test_an_engine_goes_on_without_host_memory_while_the_owner_is_frozen(oracle: Oracle, path: Path) -> None:
    owner = start(run_owner, path, PAGES)
    with engine_at(oracle, path, 0.3) as engine:
        wait_for(lambda: is_stored(oracle, engine))
        freeze(owner)
        assert engine.lookup(prompt(1, LENGTH)) == 0
        assert not engine.retrieve(prompt(1, LENGTH), slot_mapping=run_slots(16, LENGTH)).any()
        engine.store(prompt(2, LENGTH), slot_mapping=run_slots(0, LENGTH))
        assert not engine.flush(5), "the owner does not say that it has all"
        assert engine.stats()["pins"] == 0
        assert "lwkv_chunks" in engine.metrics()
        wait_for(lambda: engine.counts().get("host_memory_late", 0) >= 1)
        thaw(owner)
        wait_for(lambda: engine.lookup(prompt(1, LENGTH)) == LENGTH)
        assert engine.lookup(prompt(2, LENGTH)) == 0
    kill(owner)


def is_stored(oracle: Oracle, engine: CacheEngine) -> bool:
    """Store a prompt; whether it is there. On a busy machine the owner may be late."""
    oracle.compute(prompt(1, LENGTH), run_slots(0, LENGTH))
    engine.store(prompt(1, LENGTH), slot_mapping=run_slots(0, LENGTH))
    return engine.flush() and engine.lookup(prompt(1, LENGTH)) == LENGTH


def test_an_engine_whose_chunk_does_not_fit_is_refused_and_leaves_the_owner(
    oracle: Oracle, path: Path
) -> None:
    with owner_at(path, 2) as owner:
        with pytest.raises(ConfigError, match=r"the owner has 2 pages .* one chunk of 3 layers needs 3"):
            engine_at(oracle, path)
        wait_for(lambda: owner.server.status()["clients"] == 0)


def test_a_pool_that_is_closed_before_anything_is_page_locked_leaves_the_owner(
    oracle: Oracle, path: Path
) -> None:
    with owner_at(path, PAGES) as owner:
        pool, _ = open_node_memory(str(path), oracle.platform, 4096, 10.0, Counters(), locks_ahead=True)
        assert owner.server.status()["clients"] == 1
        pool.close()
        wait_for(lambda: owner.server.status()["clients"] == 0)


def test_no_descriptor_is_left_by_engines_and_owners(oracle: Oracle, path: Path) -> None:
    def serve() -> None:
        with owner_at(path, PAGES), engine_at(oracle, path) as engine:
            store(oracle, engine, prompt(1, LENGTH), run_slots(0, LENGTH))
            keeper = engine._pool.on_end.__self__
        keeper.join(30)

    serve()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        serve()
    wait_for(lambda: (gc.collect(), len(os.listdir("/proc/self/fd")))[1] <= before)


class RankOracle(Oracle):
    """The caches of one rank of two."""

    rank = 0

    @property
    def metadata(self) -> CacheMetadata:
        return replace(super().metadata, tp_size=2, tp_rank=self.rank)


@pytest.mark.parametrize(("form", "is_shared"), [("vllm_mla", True), ("vllm_2bnhd", False)])
def test_rows_that_all_ranks_have_are_saved_once_and_loaded_by_each(
    platform: Platform, device: torch.device, path: Path, form: str, is_shared: bool
) -> None:
    first, second = (RankOracle(platform, device, form, DIMS) for _ in range(2))
    second.rank = 1
    with owner_at(path, PAGES), engine_at(first, path) as one, engine_at(second, path) as other:
        assert (one.namespace == other.namespace) is is_shared
        for oracle, engine in ((first, one), (second, other)):
            store(oracle, engine, prompt(1, LENGTH), run_slots(0, LENGTH))
        assert other.stats()["pages_in_use"] == 3 * DIMS.layers * (1 if is_shared else 2)
        assert other.stats().get("tokens_stored", 0) == (0 if is_shared else LENGTH)
        for oracle, engine in ((first, one), (second, other)):
            assert load(oracle, engine, prompt(1, LENGTH)) == LENGTH


def test_a_rank_that_another_one_saves_for_stores_by_itself_in_own_memory(
    platform: Platform, device: torch.device
) -> None:
    oracle = RankOracle(platform, device, "vllm_mla", DIMS)
    oracle.rank = 1
    with oracle.engine(CHUNK) as engine:
        store(oracle, engine, prompt(1, LENGTH), run_slots(0, LENGTH))
        assert load(oracle, engine, prompt(1, LENGTH)) == LENGTH
