"""Segments in tiers below host memory, and what becomes of those that do not arrive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blend.conftest import CHUNK, DOCUMENTS, Bench, host, prompt, with_documents_in
from oracle import MemoryTier

from lwkv.blend import AllTokens, BlendRequest, Deviation, NoTokens, QueryAttention
from lwkv.keys import LayerKey
from lwkv.reference import ModelShape
from lwkv.storage import Status

Open = Callable[..., Bench]


@pytest.fixture(params=["memory", "disk"])
def open_bench(
    request: pytest.FixtureRequest, tmp_path: Path, shape: ModelShape, device: torch.device
) -> Open:
    """Opens benches over one tier, one after the other: each finds what those before have left there."""
    if request.param == "disk":
        settings: dict[str, Any] = {"local_disk": str(tmp_path), "max_local_disk_size": 0.1}
        return lambda: Bench(shape, device, **settings)
    tier = MemoryTier()
    return lambda: Bench(shape, device, tiers=[tier])


@pytest.mark.parametrize(
    "selector", [NoTokens(), Deviation("v", (1, 2), (0.4, 0.2)), QueryAttention(1, 2)], ids=str
)
def test_blends_from_a_lower_tier_equal_those_from_host_memory(selector: Any, open_bench: Open) -> None:
    first = open_bench()
    blender = first.blender(selector, share=0.2)
    first.encode(blender)
    _, request = prompt([2, 0, 1])
    wanted = host(blender.prefill([request]))
    first.close()
    second = open_bench()
    (found,) = second.blender(selector, share=0.2).prefill([request])
    assert found.num_reused == 42
    assert torch.equal(found.logits.cpu(), wanted[0])
    second.close()


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def lossy(tier: MemoryTier, shape: ModelShape, device: torch.device) -> Bench:
    return with_documents_in(tier, shape, device)


def lose(tier: MemoryTier, keys: list[Any], layer: int, status: Status) -> None:
    lost = {LayerKey(key, layer) for key in keys}
    tier.fails = lambda key: status if key in lost else Status.OK


@pytest.mark.parametrize("status", [Status.ERROR, Status.MISS])
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_segment_that_does_not_arrive_is_computed(
    layer: int, status: Status, tier: MemoryTier, lossy: Bench
) -> None:
    blender = lossy.blender(NoTokens(), share=0.0)
    lose(tier, blender.segments.keys(DOCUMENTS[2])[1:2], layer, status)
    tokens, request = prompt([0, 2, 1])
    (found,) = blender.prefill([request])
    assert (found.num_reused, found.num_computed) == (21, len(tokens) - 21)
    kept = [part for part in request.segments if part[1] - part[0] != len(DOCUMENTS[2])]
    reused = {start: lossy.alone(blender, tokens[start:end]) for start, end in kept}
    computed = [i for i in range(len(tokens)) if not any(a <= i < b for a, b in kept)]
    wanted = lossy.dense.blend(tokens, computed, reused).float()
    torch.testing.assert_close(found.logits.cpu(), wanted, rtol=1e-4, atol=1e-4)
    assert lossy.engine.stats()["blend_retries"] == 1
    lossy.close()


def test_nothing_is_learned_of_a_pass_whose_loads_failed(tier: MemoryTier, lossy: Bench) -> None:
    blender = lossy.blender()
    lose(tier, blender.segments.keys(DOCUMENTS[2])[1:2], 1, Status.ERROR)
    blender.prefill([prompt([0, 2, 1])[1]])
    assert [work.reused for work, *_ in blender._shares._pending] == [21]
    lossy.close()


def test_where_nothing_arrives_the_prompt_is_computed(tier: MemoryTier, lossy: Bench) -> None:
    blender = lossy.blender(AllTokens(), share=1.0)
    tier.fails = lambda key: Status.ERROR if key.layer == 2 else Status.OK
    tokens, request = prompt([0, 2, 1])
    (found,) = blender.prefill([request])
    assert found.num_reused == 0
    torch.testing.assert_close(found.logits.cpu(), lossy.full(tokens), rtol=1e-4, atol=1e-4)
    lossy.close()


def test_an_exact_segment_behind_a_lost_prefix_is_reused_though_computing_is_cheaper(
    tier: MemoryTier, shape: ModelShape, device: torch.device
) -> None:
    first = Bench(shape, device, tiers=[tier])
    blender = first.blender(shared_prefix=())
    first.encode(blender)
    tokens, request = prompt([2, 0, 1], head=())
    blender.prefill([BlendRequest(tokens[:CHUNK], request.slot_mapping[:CHUNK])])
    first.engine.store(tokens[:CHUNK], slot_mapping=request.slot_mapping[:CHUNK])
    first.close()
    tier.closed = False
    second = Bench(shape, device, tiers=[tier], blend_recompute_ratios=[1.0])
    blender = second.blender(shared_prefix=())
    lose(tier, second.engine._prompt_keys.keys(np.array(tokens[:CHUNK]), ()), 2, Status.ERROR)
    controller = blender._shares.controller
    assert controller is not None
    controller.compute_s, controller.load_s = 1e-5, 1e-6
    (found,) = blender.prefill([request])
    assert (found.num_known, found.num_reused) == (0, len(DOCUMENTS[2]) - CHUNK)
    torch.testing.assert_close(found.logits.cpu(), second.full(tokens), rtol=1e-4, atol=1e-4)
    second.close()


def test_other_prompts_of_a_batch_keep_what_arrived(tier: MemoryTier, lossy: Bench) -> None:
    blender = lossy.blender(Deviation(), share=0.3)
    lose(tier, blender.segments.keys(DOCUMENTS[0])[:1], 2, Status.ERROR)
    (_, one), (_, two) = prompt([0]), prompt([2, 1])
    slots = list(range(len(one.tokens) + len(two.tokens)))
    requests = [
        type(one)(one.tokens, slots[: len(one.tokens)], one.segments),
        type(two)(two.tokens, slots[len(one.tokens) :], two.segments),
    ]
    found = blender.prefill(requests)
    assert [item.num_reused for item in found] == [0, 29]
    torch.testing.assert_close(found[0].logits.cpu(), lossy.full(one.tokens), rtol=1e-4, atol=1e-4)
    lossy.close()
