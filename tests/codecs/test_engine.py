"""Lossless pages through the whole engine: every layout, tiers, broken pages, pages that do not shrink."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import FORMS, Dims, MemoryTier, Oracle, require_rest, run_slots
from page_coders import TorchPaged
from shared_host.owners import owner_at

from lwkv.codecs.torch_lossless import TorchLossless
from lwkv.connectors import Rope
from lwkv.engine import CacheEngine, Request
from lwkv.errors import ConfigError
from lwkv.platforms import Platform
from lwkv.transfer import Transfer

CHUNK = 8
DIMS = Dims(layers=3, blocks=24, head_size=4, dtype=torch.bfloat16)
TOKENS = list(range(300, 321))  # two chunks and a part of one
FROM, INTO = run_slots(0, 21), run_slots(40, 21, backwards=True)


@pytest.fixture
def make(platform: Platform, device: torch.device) -> Callable[..., Oracle]:
    return lambda form="vllm_2bnhd", dims=DIMS: Oracle(platform, device, form, dims)


def store(oracle: Oracle, engine: Any, tokens: list[int] = TOKENS) -> None:
    oracle.compute(tokens, FROM[: len(tokens)])
    engine.store(tokens, slot_mapping=FROM[: len(tokens)])
    assert engine.flush()


def retrieve(oracle: Oracle, engine: Any, tokens: list[int] = TOKENS) -> list[bool]:
    """The tokens that were retrieved, all bytes being right."""
    slots = INTO[: len(tokens)]
    mask = engine.retrieve(tokens, slot_mapping=slots)
    oracle.expect(tokens, slots, mask)
    oracle.check()
    found: list[bool] = mask.tolist()
    return found


@pytest.mark.parametrize("form", [form for form in FORMS if form != "opaque"])
@pytest.mark.parametrize("staging_chunks", [1, 2, 12], ids="{} chunks staged".format)
@pytest.mark.parametrize("blending", [False, True])
def test_what_is_stored_comes_back_in_every_layout(
    form: str, staging_chunks: int, blending: bool, make: Callable[..., Oracle]
) -> None:
    oracle = make(form)
    # Four staging buffers of coded pages, and two of raw ones.
    staging = staging_chunks * (6 * 4096 + 2 * oracle.page_bytes(CHUNK))
    settings = {"save_unfull_chunk": True, "enable_blending": blending, "staging_bytes": staging}
    with oracle.engine(CHUNK, page_codec="lossless", **settings) as engine:
        assert engine.connector.codec.name == "lossless"
        store(oracle, engine)
        assert all(retrieve(oracle, engine))
        require_rest(engine)


def test_tokens_that_the_engine_has_are_not_written(make: Callable[..., Oracle]) -> None:
    oracle = make()
    with oracle.engine(CHUNK, page_codec="lossless") as engine:
        store(oracle, engine)
        mask = [False] * 5 + [True] * 16
        found = engine.retrieve(TOKENS, mask, slot_mapping=INTO)
        oracle.expect(TOKENS, INTO, found)
        oracle.check()
        assert found.tolist() == [False] * 5 + [True] * 11 + [False] * 5


@pytest.fixture
def paged_coders(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> list[TorchPaged]:
    """Those that are made, where pages are coded in torch."""
    if platform.features.triton:
        pytest.skip("this platform has its own, which all tests here use")
    made: list[TorchPaged] = []

    def paged(coder: TorchLossless, layers: Any) -> TorchPaged:
        made.append(TorchPaged(coder, layers))
        return made[-1]

    monkeypatch.setattr(TorchLossless, "paged", paged)
    return made


@pytest.mark.parametrize("form", ["vllm_2bnhd", "vllm_bhn2d", "vllm_mla"])
@pytest.mark.parametrize("staging_chunks", [1, 2, 12], ids="{} chunks staged".format)
def test_full_chunks_are_coded_from_their_blocks_and_decoded_into_them(
    form: str, staging_chunks: int, paged_coders: list[TorchPaged], make: Callable[..., Oracle]
) -> None:
    oracle = make(form, replace(DIMS, head_size=8))  # layers that may share staging
    staging = staging_chunks * (6 * 4096 + 2 * oracle.page_bytes(CHUNK))
    settings = {"save_unfull_chunk": True, "staging_bytes": staging, "group_bytes": 1 << 20}
    with oracle.engine(CHUNK, page_codec="lossless", **settings) as engine:
        (coder,), prompt = paged_coders, TOKENS[:16]
        assert (coder.encoded, coder.decoded) == (1, 1)  # at the start, so that no request finds it new
        coder.encoded = coder.decoded = 0
        store(oracle, engine, prompt)
        slices = 2 // min(staging_chunks, 2)
        assert (coder.encoded, coder.decoded) == (DIMS.layers * slices, 0)
        assert all(retrieve(oracle, engine, prompt))
        assert (coder.encoded, coder.decoded) == (DIMS.layers * slices, DIMS.layers * slices)
        # A chunk that is not full, and one of which the engine has some tokens, go by way of raw pages.
        other = [1000 + token for token in TOKENS]
        store(oracle, engine, other)
        assert all(retrieve(oracle, engine, other))
        mask = [False] * 5 + [True] * 11
        oracle.expect(prompt, INTO[:16], engine.retrieve(prompt, mask, slot_mapping=INTO[:16]))
        oracle.check()
        assert (coder.encoded, coder.decoded) == (DIMS.layers * slices, DIMS.layers * slices)
        require_rest(engine)


def test_pages_with_raw_ones_beside_them_go_by_way_of_raw_pages(
    paged_coders: list[TorchPaged], bits: Bits
) -> None:
    with bits.engine() as engine:
        values = torch.randn(192, 2, 64).bfloat16().view(torch.int16)
        bits.fill(values, 0, 192)
        bits.fill(STEEP, 64, 128, bits.views[2:3])
        bits.store(engine)
        bits.store(engine)
        (coder,) = paged_coders
        coder.decoded = 0
        assert bits.loaded(engine) == 192
        some = coder.decoded
        bits.fill(values, 0, 192)
        for number in (1, 2):
            bits.store(engine, [1000 * number + token for token in PROMPT])
        assert bits.loaded(engine, [2000 + token for token in PROMPT]) == 192
        assert 0 < some < coder.decoded - some


def test_requests_in_one_batch(make: Callable[..., Oracle]) -> None:
    oracle, other = make(), list(range(900, 916))
    with oracle.engine(CHUNK, page_codec="lossless", group_bytes=1 << 20) as engine:
        store(oracle, engine)
        store(oracle, engine, other)
        requests = [Request(TOKENS, INTO), Request(other, run_slots(70, 16))]
        *_, masks = engine.retrieve_batch(requests)
        for request, mask in zip(requests, masks, strict=True):
            oracle.expect(request.tokens, request.slot_mapping, mask)
            assert mask.sum() == 16
        oracle.check()


@pytest.mark.parametrize("in_place", [False, True])
def test_keys_turn_to_the_same_bits_as_those_of_raw_pages(
    in_place: bool, platform: Platform, device: torch.device
) -> None:
    oracle, found = Oracle(platform, device, "vllm_2bnhd", DIMS, coarse=True), []
    shift = np.repeat([40, -7], CHUNK)
    for codec in ("raw", "lossless", "fp8"):
        with oracle.engine(CHUNK, page_codec=codec, enable_blending=True) as engine:
            connector: Any = engine.connector
            connector.set_rope(Rope((1.0, 0.3)))
            store(oracle, engine)
            hold = engine._storage.hold(engine._prompt_keys.keys(np.array(TOKENS), ()))
            loader = connector.in_place if in_place else connector.loader
            load = loader.begin_load(Transfer(np.array([CHUNK] * 2), np.array(INTO[:16])), shift=shift)
            for layer in range(DIMS.layers):
                loader.load_layer(load, layer, hold.host_pages(layer))
                loader.wait_layer(load, layer)
            loader.leave_load(load)
            loader.end_load(load)
            hold.release()
            oracle.platform.synchronize_device(device)
            found.append([view.k.clone() for view in connector.layers])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_folder_keeps_coded_pages_which_engines_with_raw_pages_do_not_see(
    make: Callable[..., Oracle], tmp_path: Path
) -> None:
    oracle = make()
    settings = {"local_disk": str(tmp_path), "max_local_disk_size": 0.1}
    with oracle.engine(CHUNK, page_codec="lossless", **settings) as engine:
        store(oracle, engine)
    with oracle.engine(CHUNK, page_codec="raw", **settings) as engine:
        assert engine.lookup(TOKENS) == 0
    with oracle.engine(CHUNK, page_codec="lossless", **settings) as engine:
        assert engine.lookup(TOKENS) == 16
        assert sum(retrieve(oracle, engine)) == 16
        assert engine.stats()["disk_get_bytes"] == 2 * DIMS.layers * engine.connector.page_bytes


@pytest.mark.parametrize("word", [0, 2, 3, 5, 16, 17])
def test_a_broken_page_of_a_tier_is_a_miss(word: int, make: Callable[..., Oracle]) -> None:
    """Word 5 counts the escapes; from 16 on are the starts of the groups."""
    oracle, tier = make(), MemoryTier()
    with oracle.engine(CHUNK, page_codec="lossless", tiers=[tier]) as engine:
        store(oracle, engine)
    victim = sorted(tier.pages)[1 + DIMS.layers]  # layer 1 of one of the chunks
    tier.pages[victim].view(torch.int32)[word] ^= 0x40000000
    with oracle.engine(CHUNK, page_codec="lossless", tiers=[tier]) as engine:
        first = engine.keys(TOKENS)[0]
        found = engine.retrieve(TOKENS, slot_mapping=INTO)
        lost = range(8) if victim.chunk == first else range(8, 16)
        assert [i for i in range(16) if not found[i]] == [*lost]
        oracle.forget(INTO, ~found.numpy())
        oracle.expect(TOKENS, INTO, found)
        oracle.check()
        assert engine.stats()["memory_broken_pages"] == 1
        require_rest(engine)


LARGE = replace(DIMS, blocks=32, block_size=16, heads=2, head_size=64)
PROMPT = list(range(192))  # three chunks of 64
# An element so much larger than the others of its row that they all are escapes.
STEEP = torch.tensor([0x7F00] + [0x0100] * 63, dtype=torch.int16)


class Bits:
    """Caches whose bits a test writes: stored from slots 0 on, loaded to those from 256 on."""

    def __init__(self, platform: Platform, device: torch.device, form: str = "vllm_2bnhd") -> None:
        self.oracle = Oracle(platform, device, form, LARGE)
        self.device, self.platform = device, platform

    def engine(self, **settings: Any) -> CacheEngine:
        engine = self.oracle.engine(64, page_codec="lossless", pages=256, **settings)
        self.views = [
            view for layer in engine.connector.layers for view in (layer.k, layer.v) if view is not None
        ]
        return engine

    def fill(self, bits: torch.Tensor, first: int, last: int, views: Any = None) -> None:
        """Write `bits` to the rows of slots [first, last) of `views`, or all."""
        slots = torch.arange(first, last, device=self.device)
        for view in self.views if views is None else views:
            view[slots // 16, slots % 16] = bits.to(self.device)
        self.platform.synchronize_device(self.device)

    def store(self, engine: CacheEngine, tokens: list[int] = PROMPT) -> None:
        engine.store(tokens, slot_mapping=run_slots(0, 192))
        assert engine.flush()

    def loaded(self, engine: CacheEngine, tokens: list[int] = PROMPT) -> int:
        """How many tokens come back; their bits are as stored."""
        found = engine.retrieve(tokens, slot_mapping=run_slots(256, 192))
        self.platform.synchronize_device(self.device)
        slots = torch.arange(192, device=self.device)[found.to(self.device)]
        for view in self.views:
            stored = view[slots // 16, slots % 16]
            assert torch.equal(stored, view[16 + slots // 16, slots % 16])
        return int(found.sum())


@pytest.fixture
def bits(platform: Platform, device: torch.device) -> Bits:
    return Bits(platform, device)


def test_a_page_that_does_not_shrink_is_not_stored_at_first_and_then_kept_raw(
    bits: Bits, caplog: pytest.LogCaptureFixture
) -> None:
    tier = MemoryTier()
    with bits.engine(tiers=[tier]) as engine, caplog.at_level(logging.WARNING):
        bits.fill(torch.randn(192, 2, 64).bfloat16().view(torch.int16), 0, 192)
        bits.fill(STEEP, 64, 128, bits.views[2:3])  # K of layer 1, second chunk
        bits.store(engine)
        stats = engine.stats()
        assert (stats["chunks_not_coded"], stats["chunks"], stats["tokens_stored"]) == (1, 2, 128)
        assert "1 of 3 chunks are not stored" in caplog.text
        assert engine.lookup(PROMPT) == 64
        bits.store(engine)
        stats = engine.stats()
        assert (stats["chunks_not_coded"], stats["chunks"], stats["tokens_stored"]) == (1, 3, 192)
        assert stats["pages_in_use"] == 3 * 3 + 2
        assert bits.loaded(engine) == 192
        assert stats["memory_left_out"] == 1
        assert {key.chunk for key in tier.pages} == {engine.keys(PROMPT)[i] for i in (0, 2)}
        # What shrinks again has no pages beside it.
        bits.fill(torch.randn(192, 2, 64).bfloat16().view(torch.int16), 0, 192)
        for number in (1, 2):
            bits.store(engine, [1000 * number + token for token in PROMPT])
        assert engine.stats()["pages_in_use"] == 9 * 3 + 2
        pool = engine._pool
    assert pool.pages_in_use == 0


@pytest.mark.parametrize("settings", [{}, {"staging_bytes": 1 << 20}, {"enable_blending": True}], ids=str)
@pytest.mark.parametrize("form", ["vllm_2bnhd", "vllm_bhn2d"])
def test_random_bits_come_back(
    form: str, settings: dict[str, Any], platform: Platform, device: torch.device
) -> None:
    bits = Bits(platform, device, form)
    with bits.engine(**settings) as engine:
        random = np.random.default_rng(5).integers(-(1 << 15), 1 << 15, (192, 2, 64), np.int16)
        bits.fill(torch.from_numpy(random), 0, 192)
        bits.store(engine)
        assert engine.lookup(PROMPT) == 0
        bits.store(engine)
        assert bits.loaded(engine) == 192
        assert engine.stats()["chunks_not_coded"] == 3


def test_pages_that_do_not_shrink_are_read_by_another_engine_of_the_same_node(
    bits: Bits, tmp_path: Path
) -> None:
    path = tmp_path / "host.sock"
    with owner_at(path, 200, 24576), bits.engine(host_memory=str(path)) as one:
        bits.fill(STEEP, 0, 192)
        for _ in range(2):
            bits.store(one)
        with bits.engine(host_memory=str(path)) as other:
            assert other.lookup(PROMPT) == 192
            assert bits.loaded(other) == 192
            require_node_rest(other, 3 * 3 + 3 * 3 * 2)


def require_node_rest(engine: CacheEngine, pages: int) -> None:
    assert engine.flush()
    assert engine.stats()["page_references"] == 0
    assert engine.stats()["pages_in_use"] == pages


def test_where_memory_has_no_room_for_raw_pages_the_chunk_is_not_stored(bits: Bits) -> None:
    with bits.engine() as engine:
        bits.fill(STEEP, 0, 192)
        bits.store(engine)
        held = engine._pool.allocate(engine._pool.available - 9)
        assert held is not None
        bits.store(engine)
        assert engine.stats()["chunks_not_coded"] == 6
        engine._pool.release(held)
        assert engine.stats()["pages_in_use"] == 0
        bits.store(engine)
        assert bits.loaded(engine) == 192


@pytest.mark.parametrize(
    ("form", "changes", "told"),
    [
        ("opaque", {}, "is opaque"),
        ("vllm_2bnhd", {"dtype": torch.float32}, "is float32, and not bfloat16"),
        ("vllm_2bnhd", {"dtype": torch.float16}, "is float16"),
        ("vllm_2bnhd", {"head_size": 3}, "heads of 3 elements"),
    ],
)
def test_what_cannot_be_coded_is_refused_by_name_or_left_raw(
    form: str, changes: dict[str, Any], told: str, make: Callable[..., Oracle]
) -> None:
    oracle = make(form, replace(DIMS, **changes))
    with pytest.raises(ConfigError, match=f"page_codec=lossless: layer 'layer_0' .*{told}"):
        oracle.engine(CHUNK, page_codec="lossless")
    with oracle.engine(CHUNK) as engine:
        assert engine.connector.codec.name == "raw"


@pytest.mark.parametrize(
    ("changes", "settings", "measured", "chosen", "why"),
    [
        ({}, {}, False, "raw", "page_codec=auto: lossless was not measured to be as fast here"),
        ({}, {}, True, "lossless", "page_codec=auto: as fast as raw here or faster"),
        ({}, {"page_codec": "raw"}, True, "raw", "page_codec=raw"),
        ({"dtype": torch.float16}, {}, True, "raw", "layer 'layer_0' is float16, and not bfloat16"),
        ({"heads": 1, "head_size": 4}, {}, True, "raw", "pages of layer 'layer_0' would not be smaller"),
        ({}, {"enable_blending": True}, True, "raw", "lossless was not measured with blending"),
        # What is enough for raw pages stays enough.
        ({}, {"staging_bytes": 6 * 32768}, True, "raw", "lossless needs staging_bytes of 237568 or more"),
        ({}, {"staging_bytes": 237568}, True, "lossless", "page_codec=auto"),
        ({}, {"use_gpu": False}, True, "lossless", "page_codec=auto"),
    ],
)
def test_auto_is_lossless_where_that_was_measured_and_nothing_speaks_against_it(
    changes: dict[str, Any],
    settings: dict[str, Any],
    measured: bool,
    chosen: str,
    why: str,
    make: Callable[..., Oracle],
    platform: Platform,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dims = replace(DIMS, **({"blocks": 32, "heads": 2, "head_size": 64} | changes))
    monkeypatch.setattr(platform, "features", replace(platform.features, lossless_pages=measured))
    with make(dims=dims).engine(64, **({"staging_bytes": None} | settings)) as engine:
        assert engine.connector.codec.name == chosen
        assert why in engine.connector.why_codec
        assert f"{chosen} pages ({engine.connector.why_codec})" in engine._describe()


def test_the_same_memory_has_room_for_a_third_more_tokens(make: Callable[..., Oracle]) -> None:
    oracle = make(dims=replace(DIMS, block_size=16, heads=4, head_size=64))
    pages = []
    for codec in ("raw", "lossless"):
        with oracle.engine(128, pages=300, page_codec=codec) as engine:
            pages.append(engine._pool.max_pages)
            assert engine.connector.codec.name == codec
            assert codec in engine._describe()
    assert pages[1] / pages[0] > 1.27
