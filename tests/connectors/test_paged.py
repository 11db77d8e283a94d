"""The PagedMem connector through the engine: every layout, byte for byte."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from oracle import FORMS, Dims, MemoryTier, Oracle, held_completions, refuse_threads, require_rest, run_slots

from lwkv.config.settings import Config
from lwkv.engine import CacheEngine
from lwkv.errors import ConfigError, LayoutError
from lwkv.layouts.layout import KVSpec
from lwkv.metadata import CacheMetadata
from lwkv.platforms import Platform
from lwkv.storage import Status
from lwkv.transfer import Transfer

FORM = pytest.mark.parametrize("form", FORMS)
CANONICAL = [name for name, form in FORMS.items() if not form.mla and name != "opaque"]
MLA = [name for name, form in FORMS.items() if form.mla]


@pytest.fixture
def make_oracle(platform: Platform, device: torch.device) -> Any:
    return lambda form, **dims: Oracle(platform, device, form, Dims(**dims))


def store(oracle: Oracle, engine: Any, tokens: list[int], slots: Any) -> None:
    oracle.compute(tokens, slots)
    engine.store(tokens, slot_mapping=slots)
    assert engine.flush()


def in_blocks(rng: np.random.Generator, oracle: Oracle, count: int) -> np.ndarray:
    size = oracle.dims.block_size
    blocks = rng.permutation(oracle.dims.blocks)[: -(-count // size)]
    return (blocks[:, None] * size + np.arange(size)).ravel()[:count]


@FORM
@pytest.mark.parametrize("buffered", [False, True], ids=["paged", "buffer"])
@pytest.mark.parametrize("staging_chunks", [1, 2, 9])
@pytest.mark.parametrize(("chunk", "block"), [(8, 4), (4, 4), (12, 6), (6, 3)])
def test_every_byte_comes_back_and_no_other_changes(
    make_oracle: Any, form: str, buffered: bool, staging_chunks: int, chunk: int, block: int
) -> None:
    oracle: Oracle = make_oracle(form, blocks=72 // block, block_size=block)
    if buffered and form == "opaque":
        with pytest.raises(LayoutError, match="cannot be blended"):
            oracle.engine(chunk, enable_blending=True)
        return
    rng = np.random.default_rng(chunk * block)
    tokens = [int(token) for token in rng.integers(0, 1000, 4 * chunk + block + 1)]
    with oracle.engine(
        chunk,
        staging_bytes=6 * staging_chunks * oracle.page_bytes(chunk),
        save_unfull_chunk=True,
        enable_blending=buffered,
    ) as engine:
        store(oracle, engine, tokens, in_blocks(rng, oracle, len(tokens)))
        cached = len(tokens) if form != "opaque" else len(tokens) // block * block
        assert engine.lookup(tokens) == cached
        for local in (0, block, chunk + block):
            into = in_blocks(rng, oracle, len(tokens))
            mask = engine.retrieve(tokens, np.arange(len(tokens)) >= local, slot_mapping=into)
            assert int(mask.sum()) == cached - local
            oracle.expect(tokens, into, mask)
            oracle.check()
        require_rest(engine)


@FORM
def test_the_first_and_the_last_slot_are_slots_like_others(make_oracle: Any, form: str) -> None:
    oracle: Oracle = make_oracle(form, blocks=8)
    last = oracle.dims.slots
    with oracle.engine(8) as engine:
        store(oracle, engine, list(range(8)), run_slots(last - 8, 8))
        assert engine.retrieve(list(range(8)), slot_mapping=run_slots(0, 8)).all()
        oracle.expect(list(range(8)), run_slots(0, 8))
        oracle.zero(run_slots(last - 8, 8))
        assert engine.retrieve(list(range(8)), slot_mapping=run_slots(last - 8, 8)).all()
        oracle.expect(list(range(8)), run_slots(last - 8, 8))
        oracle.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8], ids=str)
@pytest.mark.parametrize("form", ["vllm_2bnhd", "vllm_bhn2d", "padded", "vllm_mla"])
def test_bytes_are_moved_as_they_are_in_every_dtype(make_oracle: Any, form: str, dtype: torch.dtype) -> None:
    oracle: Oracle = make_oracle(form, blocks=24, head_size=8, dtype=dtype)
    tokens = list(range(40))
    with oracle.engine(8) as engine:
        store(oracle, engine, tokens, run_slots(0, 40))
        assert engine.retrieve(tokens, slot_mapping=run_slots(50, 40)).all()
        oracle.expect(tokens, run_slots(50, 40))
        oracle.check()


@pytest.mark.parametrize(("one", "other"), [*pairwise([*CANONICAL, CANONICAL[0]]), *pairwise([*MLA, MLA[0]])])
def test_what_one_layout_stored_another_loads(make_oracle: Any, one: str, other: str) -> None:
    tier, tokens = MemoryTier(), list(range(20))
    from_oracle: Oracle = make_oracle(one)
    with from_oracle.engine(8, tiers=[tier]) as engine:
        store(from_oracle, engine, tokens, run_slots(0, 20))
    into: Oracle = make_oracle(other, blocks=11)
    with into.engine(8, tiers=[tier]) as engine:
        mask = engine.retrieve(tokens, slot_mapping=run_slots(20, 20))
        assert int(mask.sum()) == 16
        into.rows(tokens, 0)
        into.expect(tokens, run_slots(20, 20), mask)
        into.check()


@pytest.mark.parametrize("layout", ["vllm_2bnhd", "vllm_b2nhd", "vllm_2bhnd", "vllm_b2hnd"])
def test_where_sizes_coincide_the_layout_must_be_declared(
    platform: Platform, device: torch.device, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, dims = FORMS[layout], Dims(blocks=16, block_size=2, heads=2)
    monkeypatch.setitem(FORMS, "undeclared", replace(form, hints={}))
    monkeypatch.setitem(FORMS, "declared", replace(form, hints={"layout": layout}))
    with pytest.raises(LayoutError, match=r"'layer_0'.* can be any of .*declare which"):
        Oracle(platform, device, "undeclared", dims).engine(8)
    oracle = Oracle(platform, device, "declared", dims)
    with oracle.engine(8) as engine:
        store(oracle, engine, list(range(8)), run_slots(0, 8))
        assert engine.retrieve(list(range(8)), slot_mapping=run_slots(9, 8)).all()
        oracle.expect(list(range(8)), run_slots(9, 8))
        oracle.check()


def test_layers_may_have_rows_of_different_sizes(platform: Platform, device: torch.device) -> None:
    dtypes = [torch.float32, torch.float16, torch.float64, torch.uint8, torch.float16]
    random = torch.Generator().manual_seed(5)
    wanted = [torch.randint(256, (2, 10, 4, 2, 3 * t.itemsize), generator=random).byte() for t in dtypes]
    caches = {
        f"l.{i}": t.to(device).view(dtype) for i, (t, dtype) in enumerate(zip(wanted, dtypes, strict=True))
    }
    metadata = CacheMetadata("mixed", len(dtypes), 2, 3, torch.float32, kv_dtype=torch.float8_e5m2)
    config = Config(chunk_size=8, max_local_cpu_size=2**-8, use_gpu=False)
    slots, into = np.arange(16), np.arange(20, 36)
    with CacheEngine.create(config, metadata, caches, "vllm", {"block_size": 4}, platform) as engine:
        engine.store(list(range(16)), slot_mapping=slots)
        assert engine.flush()
        assert engine.retrieve(list(range(16)), slot_mapping=into).all()
        platform.synchronize_device(device)
        for cache, bits in zip(caches.values(), wanted, strict=True):
            bits.flatten(1, 2)[:, into] = bits.flatten(1, 2)[:, slots]
            assert torch.equal(cache.view(torch.uint8).cpu(), bits)
        require_rest(engine)


def test_what_opaque_blocks_hold_is_for_the_same_layout_only(make_oracle: Any) -> None:
    tier, tokens = MemoryTier(), list(range(8))
    oracle: Oracle = make_oracle("opaque")
    with oracle.engine(8, tiers=[tier]) as engine:
        store(oracle, engine, tokens, run_slots(0, 8))
    for form, block, found in (("opaque", 4, 8), ("opaque", 2, 0), ("vllm_b2nhd", 4, 0)):
        with make_oracle(form, block_size=block).engine(8, tiers=[tier]) as engine:
            assert engine.lookup(tokens) == found


def test_opaque_blocks_need_chunks_of_whole_blocks(make_oracle: Any) -> None:
    with pytest.raises(ValueError, match="chunk_size must be a multiple of that, got 6"):
        make_oracle("opaque").engine(6)


def test_other_caches_than_were_registered_are_refused(make_oracle: Any) -> None:
    tokens = list(range(8))
    oracle: Oracle = make_oracle("sglang_kv", block_size=1)
    with oracle.engine(8) as engine:
        engine.store(tokens, slot_mapping=tokens, kvcaches=oracle.kvcaches)
        pairs = oracle.kvcaches
        given = list(pairs)
        given[-1] = [pairs[-1][0], pairs[-1][1].clone()]
        for caches in (given, pairs[:-1], pairs[::-1]):
            with pytest.raises(LayoutError, match="other KV caches were registered"):
                engine.retrieve_layer(tokens, slot_mapping=tokens, kvcaches=caches)
        same = pairs[:-1]
        same.append([pairs[-1][0].detach(), pairs[-1][1]])
        assert engine.retrieve(tokens, slot_mapping=tokens, kvcaches=same) is not None


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(lambda t: t.view(t.shape[1], 2, *t.shape[2:]), id="strides"),
        pytest.param(lambda t: t.view(torch.float16), id="dtype"),
        pytest.param(lambda t: t[:, :-1], id="shape"),
    ],
)
def test_the_same_memory_seen_in_another_way_is_refused(make_oracle: Any, seen: Any) -> None:
    oracle: Oracle = make_oracle("vllm_2bnhd", dtype=torch.bfloat16)
    with oracle.engine(8) as engine:
        others = {name: seen(t) for name, t in oracle.kvcaches.items()}
        with pytest.raises(LayoutError, match="other KV caches were registered"):
            engine.store_layer([1], slot_mapping=[1], kvcaches=others)


def test_a_connector_serves_one_engine_at_a_time(make_oracle: Any) -> None:
    oracle: Oracle = make_oracle("vllm_2bnhd")
    with oracle.engine(8) as engine:
        store(oracle, engine, list(range(8)), run_slots(0, 8))
        with pytest.raises(ConfigError, match="belongs to an engine that is not closed"):
            CacheEngine(engine.config, oracle.metadata, engine.connector)
        assert engine.retrieve(list(range(8)), slot_mapping=run_slots(8, 8)).all()
        oracle.expect(list(range(8)), run_slots(8, 8))
        oracle.check()
    require_serves(oracle, engine)


def require_serves(oracle: Oracle, engine: CacheEngine) -> None:
    """Another engine can have the connector of one that has ended."""
    with CacheEngine(engine.config, oracle.metadata, engine.connector) as again:
        store(oracle, again, list(range(8)), run_slots(0, 8))
        assert again.lookup(list(range(8))) == 8


def test_an_engine_that_has_no_thread_gives_tiers_and_connector_back(
    make_oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle: Oracle = make_oracle("vllm_2bnhd")
    with oracle.engine(8) as engine:
        pass
    tier = MemoryTier()
    with monkeypatch.context() as limited:
        refuse_threads(limited, "completions")
        with pytest.raises(RuntimeError, match="can't start new thread"):
            CacheEngine(engine.config, oracle.metadata, engine.connector, [tier])
    assert tier.closed
    require_serves(oracle, engine)


def test_more_staging_than_the_device_has_is_refused(make_oracle: Any) -> None:
    with pytest.raises(ConfigError, match=r"staging_bytes=4611686018427387904, .* but the device has \d+"):
        make_oracle("vllm_2bnhd").engine(8, staging_bytes=2**62)


def test_staging_below_a_page_for_each_buffer_is_refused_with_the_least(make_oracle: Any) -> None:
    oracle = make_oracle("vllm_2bnhd")
    page, least = oracle.page_bytes(8), (2 + 1) * 3 * oracle.page_bytes(8)
    for wrong in (1, least - 1):
        with pytest.raises(
            ConfigError, match=rf"got {wrong}; allowed: null, or {least} and more.* {page} bytes"
        ):
            oracle.engine(8, staging_bytes=wrong, staging_buffers=3)
    with oracle.engine(8, staging_bytes=least, staging_buffers=3) as engine:
        lanes = engine.connector.loader.lane, engine.connector.saver.lane
        assert [len(lane.buffers) for lane in lanes] == [6, 3]


@pytest.mark.parametrize(
    ("total", "staging"),
    [(1 << 30, 128 << 20), (48 << 30, 192 << 20), (141 << 30, 256 << 20), (None, 128 << 20)],
)
def test_staging_is_a_small_share_of_the_device_s_memory(
    make_oracle: Any, monkeypatch: pytest.MonkeyPatch, total: int | None, staging: int
) -> None:
    oracle = make_oracle("vllm_2bnhd")
    told = None if total is None else (total, total)
    monkeypatch.setattr(oracle.platform, "mem_info", lambda device: told)
    with oracle.engine(8, staging_bytes=None) as engine:
        assert len(engine.connector.loader.lane.buffers[0].memory) == staging // 4


@pytest.mark.parametrize(
    ("pages", "queued"), [(0, [1, 2, 3, 4, 5]), (7, [0, 1, 1, 2, 3]), (99, [0, 0, 0, 0, 1])]
)
def test_small_layers_are_saved_several_at_a_time(
    make_oracle: Any, monkeypatch: pytest.MonkeyPatch, pages: int, queued: list[int]
) -> None:
    """Three chunks a layer: `pages` pages hold none, two or all of the layers, which are one batch then."""
    oracle, calls = make_oracle("vllm_2bnhd", layers=5), []
    save_batch = oracle.platform.save_batch
    with oracle.engine(8, staging_bytes=1 << 20, group_bytes=pages * oracle.page_bytes(8)) as engine:
        monkeypatch.setattr(
            oracle.platform, "save_batch", lambda *batch: (calls.append(batch), save_batch(*batch))
        )
        steps, counts = engine.store_layer(list(range(24)), slot_mapping=run_slots(0, 24)), []
        for _ in range(5):
            next(steps)
            counts.append(len(calls))
        next(steps)
        assert [*counts[:4], len(calls)] == queued


def test_layers_of_a_group_that_are_not_given_one_after_the_other_go_to_their_own_pages(
    make_oracle: Any,
) -> None:
    oracle, tokens, slots = make_oracle("vllm_2bnhd", layers=4), list(range(16)), run_slots(32, 16)
    with oracle.engine(8, staging_bytes=1 << 18, group_bytes=1 << 20) as engine:
        oracle.compute(tokens, run_slots(0, 16))
        connector, pages = engine.connector, engine._pool.allocate(8).reshape(4, 2)
        save = connector.saver.begin_save(Transfer(np.array([8, 8]), np.array(run_slots(0, 16))), pages)
        load = connector.loader.begin_load(Transfer(np.array([8, 8]), np.array(slots)), pages)
        for layer in (0, 2, 3):
            connector.saver.save_layers(save, range(layer, layer + 1))
        connector.saver.finish_save(save)
        connector.saver.leave_save(save)
        connector.saver.end_save(save)
        connector.loader.leave_load(load)
        connector.loader.end_load(load)
        load = connector.loader.begin_load(Transfer(np.array([8, 8]), np.array(slots)), pages)
        # Of the chunks that are known, one is left out: what is staged has both.
        connector.loader.drop_chunks(load, np.array([False, True]))
        for layer in (0, 2, 3):
            connector.loader.load_layer(load, layer, pages[layer][1:])
            connector.loader.wait_layer(load, layer)
        connector.loader.leave_load(load)
        connector.loader.end_load(load)
        oracle.expect(tokens, slots, np.repeat([False, True], 8), layers=[0, 2, 3])
        oracle.check()
        engine._pool.release(pages)


@pytest.mark.parametrize("chunks", [1, 2])
def test_loads_that_take_turns_overwrite_each_other_s_staging_and_notice(
    make_oracle: Any, monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    """Several layers are staged together, and ahead; then the other load needs the buffers."""
    oracle, count = make_oracle("vllm_2bnhd", layers=9, blocks=40), 8 * chunks
    prompts = [list(range(start, start + count)) for start in (100, 500)]
    with oracle.engine(8, staging_bytes=6 * 6 * oracle.page_bytes(8)) as engine:
        monkeypatch.setattr(engine.connector.loader, "layers_ahead", lambda load, layer, known: 0)
        for tokens in prompts:
            store(oracle, engine, tokens, run_slots(0, count))
        slots = [run_slots(32 + 32 * i, count) for i in range(len(prompts))]
        loads = [
            engine.retrieve_layer(tokens, slot_mapping=places)
            for tokens, places in zip(prompts, slots, strict=True)
        ]
        *_, masks = zip(*loads, strict=True)
        assert all(bool(mask.all()) for mask in masks)
        for tokens, places in zip(prompts, slots, strict=True):
            oracle.expect(tokens, places)
        oracle.check()
        assert engine.flush()
        require_rest(engine)


def test_known_layers_are_queued_ahead_more_each_time(
    make_oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, queued = make_oracle("vllm_2bnhd", layers=14), []
    with oracle.engine(8) as engine:
        store(oracle, engine, list(range(24)), run_slots(0, 24))
        load_layer = engine.connector.loader.load_layer
        monkeypatch.setattr(
            engine.connector.loader,
            "load_layer",
            lambda load, i, pages: (queued.append(i), load_layer(load, i, pages)),
        )
        steps, counts = engine.retrieve_layer(list(range(24)), slot_mapping=run_slots(32, 24)), []
        for _ in range(15):
            next(steps)
            counts.append(len(queued))
        assert counts == [0, 1, 5, 9, 13, *[14] * 10]
        assert queued == list(range(14))
        *_, mask = steps
        assert bool(mask.all())


def test_a_load_keeps_its_tables_until_no_stream_reads_them(
    make_oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that fails brings new tables; the device may still be reading the old ones."""
    tier, tokens, oracle = MemoryTier(), list(range(24)), make_oracle("vllm_2bnhd")
    with oracle.engine(8, tiers=[tier]) as engine:
        store(oracle, engine, tokens, run_slots(0, 24))
    with oracle.engine(8, tiers=[tier]) as engine:
        last = engine._prompt_keys.keys(np.array(tokens), ())[-1]
        tier.fails = lambda key: Status.ERROR if (key.layer, key.chunk) == (1, last) else Status.OK
        tables = watch_pinned(monkeypatch, engine.connector.platform)
        with held_completions(engine):
            mask = engine.retrieve(tokens, slot_mapping=run_slots(32, 24))
            assert int(mask.sum()) == 16
            gc.collect()
            assert [table() is not None for table in tables] == [True, True]
            assert not any(engine.connector.loader._plans.spare.values()), "another load could write to them"
        assert engine.flush()
        assert sum(map(len, engine.connector.loader._plans.spare.values())) == 2


def test_layers_may_differ_in_what_they_keep_of_a_token(platform: Platform, device: torch.device) -> None:
    """Latent rows and an indexer's bytes, in blocks of different sizes."""
    sizes = {"l.0.mla": (10, 4, 9, torch.float32), "l.0.index": (5, 8, 20, torch.uint8)}
    wanted = {
        name: torch.randint(256, (blocks, tokens, width * dtype.itemsize), dtype=torch.uint8)
        for name, (blocks, tokens, width, dtype) in sizes.items()
    }
    caches = {name: wanted[name].to(device).view(dtype) for name, (*_, dtype) in sizes.items()}
    specs = {name: KVSpec(1, width, tokens, use_mla=True) for name, (_, tokens, width, _) in sizes.items()}
    config = Config(chunk_size=8, max_local_cpu_size=2**-8)
    metadata = CacheMetadata("mixed", 2, 1, 9, torch.float32, torch.float32, use_mla=True)
    slots, into = np.arange(16), np.arange(20, 36)
    with CacheEngine.create(config, metadata, caches, "vllm", {"specs": specs}, platform) as engine:
        engine.store(list(range(16)), slot_mapping=slots)
        assert engine.flush()
        assert engine.retrieve(list(range(16)), slot_mapping=into).all()
        platform.synchronize_device(device)
        for name, bits in wanted.items():
            bits.flatten(0, 1)[into] = bits.flatten(0, 1)[slots]
            assert torch.equal(caches[name].view(torch.uint8).cpu(), bits)


def watch_pinned(monkeypatch: pytest.MonkeyPatch, platform: Platform) -> list[weakref.ref[torch.Tensor]]:
    """References to all page-locked memory that is taken for tables from now on."""
    taken: list[weakref.ref[torch.Tensor]] = []
    allocate = type(platform).alloc_pinned

    def watched(self: Platform, nbytes: int) -> torch.Tensor:
        memory = allocate(self, nbytes)
        if nbytes < 4096:
            taken.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(type(platform), "alloc_pinned", watched)
    return taken
