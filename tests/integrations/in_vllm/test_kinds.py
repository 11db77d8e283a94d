"""The lookup over several kinds, against the coordinator with which vLLM finds its own hits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import reduce
from math import gcd, lcm
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from lwkv.kinds import Kind, find_boundary

NUM_CHUNKS = 12


def spec_of(kind: Kind) -> Any:
    if kind.form == "state":
        return MambaSpec(
            block_size=kind.block_size,
            shapes=((2, 2),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
        )
    heads = {"block_size": kind.block_size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    if kind.form == "window":
        return SlidingWindowSpec(**heads, sliding_window=kind.span)
    if kind.form == "local":
        return ChunkedLocalAttentionSpec(**heads, attention_chunk_size=kind.span)
    return FullAttentionSpec(**heads)


def coordinator(kinds: Sequence[Kind], groups_of: Sequence[int], chunk_size: int, unit: int) -> Any:
    """vLLM's, with so many groups of each kind."""
    groups = [
        KVCacheGroupSpec([f"{kind.name}.{number}.{n}"], spec_of(kind))
        for number, kind in enumerate(kinds)
        for n in range(groups_of[number])
    ]
    return HybridKVCacheCoordinator(
        KVCacheConfig(num_blocks=2, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=1 << 16,
        max_in_flight_tokens=1 << 16,
        use_eagle=False,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=chunk_size,
        hash_block_size=unit,
        allow_partial_hash_hits=False,
    )


def put(manager: Any, kinds: Sequence[Kind], groups_of: Sequence[int], present: Any, hashes: Any) -> None:
    """Have vLLM keep the blocks that we store of the chunks that are there."""
    chunk_size, unit = hashes[0], manager.hash_block_size
    first_group = 0
    for kind, count, flags in zip(kinds, groups_of, present, strict=True):
        for chunk in np.flatnonzero(flags).tolist():
            end = (chunk + 1) * chunk_size
            first = kind.first_stored(end - chunk_size, end)
            for block_end in range(first + kind.block_size, end + 1, kind.block_size):
                for group in range(first_group, first_group + count):
                    key = make_block_hash_with_group_id(hashes[1][block_end // unit - 1], group)
                    manager.block_pool.cached_block_hash_to_block.insert(key, KVCacheBlock(1))
        first_group += count


def a_kind(chance: random.Random, form: str, chunk_size: int) -> Kind:
    # vLLM has chunked local attention only where all blocks are alike, and no windows of one token.
    block = (
        chunk_size if form == "local" else chance.choice([b for b in (2, 3, 4, 6, 12) if chunk_size % b == 0])
    )
    span = {"window": chance.randint(2, 5 * chunk_size), "local": chunk_size * chance.randint(1, 5)}.get(
        form, 0
    )
    return Kind(form, block, 1, 64, ("float32",), span)  # type: ignore[arg-type]


@pytest.fixture(scope="module", autouse=True)
def specs_are_known() -> None:
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    register_all_kvcache_specs(None)


@pytest.mark.parametrize(
    "forms",
    [
        "full window",
        "full state",
        "full window window",
        "full window state",
        "window",
        "window state",
        "full local",
        "full window local",
    ],
)
def test_both_find_the_same_boundary_over_random_chunks(forms: str) -> None:
    chance = random.Random(forms)
    found = set()
    for _ in range(300):
        chunk_size = 12
        kinds = [a_kind(chance, form, chunk_size) for form in forms.split()]
        groups_of = [chance.randint(1, 2) for _ in kinds]
        if sum(groups_of) == 1:
            groups_of = [2]
        unit = reduce(gcd, (kind.block_size for kind in kinds))
        assert chunk_size % lcm(*(kind.block_size for kind in kinds)) == 0
        hashes = [BlockHash(i.to_bytes(16, "little")) for i in range(NUM_CHUNKS * chunk_size // unit)]
        rate = chance.choice([0.5, 0.8, 0.95])
        present = [np.array([chance.random() < rate for _ in range(NUM_CHUNKS)]) for _ in kinds]
        manager = coordinator(kinds, groups_of, chunk_size, unit)
        put(manager, kinds, groups_of, present, (chunk_size, hashes))
        num_tokens = chance.randint(1, NUM_CHUNKS * chunk_size)
        _, theirs, _ = manager.find_longest_cache_hit(hashes, num_tokens - 1)
        assert find_boundary(kinds, chunk_size, num_tokens, 0, present) == theirs, (
            kinds,
            present,
            num_tokens,
        )
        found.add(theirs)
    assert len(found) > 3
