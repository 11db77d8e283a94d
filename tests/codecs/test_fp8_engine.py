"""Pages of fp8 through the whole engine: every layout, hostile values, tiers, and nobody else sees them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import FORMS, Dims, MemoryTier, Oracle, require_rest, run_slots
from shared_host.owners import owner_at

from lwkv.engine import CacheEngine
from lwkv.errors import ConfigError
from lwkv.platforms import Platform

CHUNK = 8
DIMS = Dims(layers=3, blocks=24, head_size=5, dtype=torch.bfloat16)
TOKENS = list(range(300, 321))  # two chunks and a part of one
FROM, INTO = run_slots(0, 21), run_slots(40, 21, backwards=True)
CODECS = ("raw", "lossless", "fp8")


@pytest.fixture
def make(platform: Platform, device: torch.device) -> Callable[..., Oracle]:
    return lambda form="vllm_2bnhd", dims=DIMS: Oracle(platform, device, form, dims, coarse=True)


def store(oracle: Oracle, engine: CacheEngine) -> None:
    oracle.compute(TOKENS, FROM)
    engine.store(TOKENS, slot_mapping=FROM)
    assert engine.flush()


def retrieve(oracle: Oracle, engine: CacheEngine) -> int:
    """How many tokens were retrieved, all bytes being right."""
    mask = engine.retrieve(TOKENS, slot_mapping=INTO)
    oracle.expect(TOKENS, INTO, mask)
    oracle.check()
    return int(mask.sum())


@pytest.mark.parametrize("form", [form for form in FORMS if form != "opaque"])
@pytest.mark.parametrize("blending", [False, True])
def test_numbers_of_four_bits_come_back_as_they_are_in_every_layout(
    form: str, blending: bool, make: Callable[..., Oracle]
) -> None:
    oracle = make(form)
    with oracle.engine(CHUNK, page_codec="fp8", save_unfull_chunk=True, enable_blending=blending) as engine:
        assert engine.connector.codec.name == "fp8"
        assert "fp8 pages (page_codec=fp8: LOSSY, " in engine._describe()
        store(oracle, engine)
        assert retrieve(oracle, engine) == 21
        require_rest(engine)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("staging_bytes", [-1, None], ids=["a page for each buffer", "as usual"])
def test_other_floats_are_served_too(
    dtype: torch.dtype, staging_bytes: int | None, make: Callable[..., Oracle]
) -> None:
    oracle = make(dims=replace(DIMS, dtype=dtype))
    with oracle.engine(CHUNK, page_codec="fp8", staging_bytes=staging_bytes, group_bytes=1 << 20) as engine:
        store(oracle, engine)
        assert retrieve(oracle, engine) == 16


@pytest.mark.parametrize("place", ["folder", "server", "node"])
def test_engines_with_raw_lossless_and_fp8_pages_do_not_see_each_others_chunks(
    place: str, make: Callable[..., Oracle], tmp_path: Path
) -> None:
    oracle = make(dims=replace(DIMS, head_size=4))
    if place == "node":
        path = tmp_path / "host.sock"
        with owner_at(path, 400, 4096):
            require_apart(oracle, host_memory=str(path))
    elif place == "folder":
        require_apart(oracle, local_disk=str(tmp_path), max_local_disk_size=0.1)
    else:
        require_apart(oracle, tiers=[MemoryTier()])


def require_apart(oracle: Oracle, **settings: Any) -> None:
    """Each finds nothing at first, and all of its own in the end."""
    for codec in CODECS:
        with oracle.engine(CHUNK, page_codec=codec, **settings) as engine:
            assert engine.lookup(TOKENS) == 0
            store(oracle, engine)
    for codec in CODECS:
        with oracle.engine(CHUNK, page_codec=codec, **settings) as engine:
            assert engine.lookup(TOKENS) == 16
            assert retrieve(oracle, engine) == 16


def test_a_folder_has_half_of_the_bytes(make: Callable[..., Oracle], tmp_path: Path) -> None:
    oracle = make(dims=replace(DIMS, block_size=16, heads=4, head_size=64))
    tokens, found = [*range(128)], []
    oracle.compute(tokens, run_slots(0, 128))
    for codec in ("raw", "fp8"):
        settings = {"local_disk": str(tmp_path), "max_local_disk_size": 0.1, "page_codec": codec}
        with oracle.engine(128, pages=300, **settings) as engine:
            engine.store(tokens, slot_mapping=run_slots(0, 128))
        with oracle.engine(128, pages=300, **settings) as engine:
            assert engine.retrieve(tokens, slot_mapping=run_slots(128, 128)).all()
            found.append((engine.stats()["disk_get_bytes"], engine._pool.max_pages))
    (raw_bytes, raw_pages), (bytes_read, pages) = found
    assert 0 < bytes_read < 0.54 * raw_bytes
    assert pages > 1.85 * raw_pages


@pytest.mark.parametrize("word", [0, 2, 3, 5])
def test_a_broken_page_of_a_tier_is_a_miss(word: int, make: Callable[..., Oracle]) -> None:
    oracle, tier = make(), MemoryTier()
    with oracle.engine(CHUNK, page_codec="fp8", tiers=[tier]) as engine:
        store(oracle, engine)
    victim = sorted(tier.pages)[1 + DIMS.layers]  # layer 1 of one of the chunks
    tier.pages[victim].view(torch.int32)[word] ^= 1
    with oracle.engine(CHUNK, page_codec="fp8", tiers=[tier]) as engine:
        first = engine.keys(TOKENS)[0]
        found = engine.retrieve(TOKENS, slot_mapping=INTO)
        lost = range(8) if victim.chunk == first else range(8, 16)
        assert [i for i in range(16) if not found[i]] == [*lost]
        oracle.forget(INTO, ~found.numpy())
        oracle.expect(TOKENS, INTO, found)
        oracle.check()
        assert engine.stats()["memory_broken_pages"] == 1
        require_rest(engine)


def test_hostile_values_stay_where_they_are(
    make: Callable[..., Oracle], platform: Platform, device: torch.device
) -> None:
    """NaN and infinities come back; rows of denormals and of zeros are zeros; all others are rounded."""
    oracle = make(dims=replace(DIMS, head_size=8))
    values = torch.randn(16, 2, 8, generator=torch.Generator().manual_seed(2))
    values[3, 0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    values[4], values[5] = 0, 1e-40
    with oracle.engine(CHUNK, page_codec="fp8") as engine:
        k: Any = engine.connector.layers[1].k
        slots = torch.arange(16, device=device)
        source, target = (slots // 4, slots % 4), (8 + slots // 4, slots % 4)
        k[source] = values.to(device).bfloat16().view(torch.int16)
        platform.synchronize_device(device)
        engine.store([*range(16)], slot_mapping=run_slots(0, 16))
        assert engine.flush()
        assert engine.retrieve([*range(16)], slot_mapping=run_slots(32, 16)).all()
        platform.synchronize_device(device)
        found = k[target].view(torch.bfloat16).float().cpu()
        assert engine.stats().get("chunks_not_coded", 0) == 0
    assert found[3, 0, 0].isnan()
    assert found[3, 0, 1:3].tolist() == [math.inf, -math.inf]
    assert not found[4:6].any()
    rest = [*range(3), *range(6, 16)]
    assert (found[rest] - values[rest]).abs().max() <= values[rest].abs().max() / 16
    assert torch.allclose(found[3, 0, 3:], values[3, 0, 3:], rtol=0.07, atol=1e-4)


@pytest.mark.parametrize(
    ("form", "dtype", "told"),
    [("opaque", torch.bfloat16, "is opaque"), ("vllm_2bnhd", torch.float8_e4m3fn, "is float8_e4m3fn, and")],
)
def test_what_cannot_be_kept_as_fp8_is_refused_by_name(
    form: str, dtype: torch.dtype, told: str, platform: Platform, device: torch.device
) -> None:
    oracle = Oracle(platform, device, form, replace(DIMS, dtype=dtype))
    with pytest.raises(ConfigError, match=f"page_codec=fp8: layer 'layer_0' {told}.*set page_codec to auto"):
        oracle.engine(CHUNK, page_codec="fp8", staging_bytes=None)


def test_nobody_gets_fp8_who_did_not_ask(
    make: Callable[..., Oracle], platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    for measured in (False, True):
        monkeypatch.setattr(platform, "features", replace(platform.features, lossless_pages=measured))
        with make().engine(CHUNK) as engine:
            assert engine.connector.codec.name != "fp8"
