"""An engine finds only what was stored for the same model, caches and ranks."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from engine.rig import CHUNK, LAYERS, prompt, store_in
from oracle import Dims, MemoryTier, Oracle, run_slots

from lwkv.metadata import CacheMetadata
from lwkv.platforms import Platform


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
