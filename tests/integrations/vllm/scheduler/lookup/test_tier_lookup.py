from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from storage.faulty_tier import Fault, FaultyTier, hanging
from storage.rig import Clock, key, keys

from lwkv.config.settings import Config
from lwkv.integrations.vllm.reports import RankInfo
from lwkv.integrations.vllm.scheduler.lookup import tier_lookup
from lwkv.integrations.vllm.scheduler.lookup.tier_lookup import TierLookup, TierLookups, open_lower_tiers
from lwkv.keys import ChunkKey, LayerKey
from lwkv.storage import TierSetup
from lwkv.storage.registry import open_tiers
from lwkv.telemetry.counters import Counters

PAGE_BYTES = 96


def holding(*numbers: int) -> FaultyTier:
    tier = FaultyTier()
    tier.put([LayerKey(key(number), 0) for number in numbers], [torch.zeros(1)] * len(numbers), 1.0)
    return tier


def there(tiers: TierLookups, chunks: Sequence[ChunkKey]) -> list[bool]:
    return [name is not None for name in tiers.find(chunks)]


def lower(*tiers: FaultyTier) -> TierLookups:
    return TierLookups([TierLookup(tier, Counters()) for tier in tiers])


def test_a_chunk_is_there_if_one_of_the_tiers_has_it() -> None:
    tiers = lower(holding(1), holding(2))
    assert there(tiers, keys(0, 1, 2)) == [False, True, True]
    assert there(tiers, []) == []
    tiers.close()


@pytest.mark.parametrize(
    "fault",
    [
        Fault(RuntimeError("down")),
        Fault(answer=lambda found: found[1:]),
        Fault(answer=lambda found: None),
        Fault(answer=lambda found: ["yes"] * len(found)),
    ],
    ids=["raises", "answers less", "answers nothing", "answers something else"],
)
def test_a_tier_that_fails_has_nothing(fault: Fault) -> None:
    near, far = holding(1), holding(2)
    near.faults["contains"] = fault
    tiers = lower(near, far)
    assert there(tiers, keys(1, 2)) == [False, True]
    tiers.close()


def test_a_tier_that_does_not_answer_has_nothing_and_is_let_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_lookup, "ANSWER_S", 0.01)
    tier = holding(1)
    tier.faults["contains", 0] = fault = hanging()
    tiers = lower(tier)
    assert there(tiers, keys(1)) == [False]
    assert there(tiers, keys(1)) == [False]
    assert [name for name, _ in tier.calls].count("contains") <= 1
    assert fault.gate is not None
    fault.gate.set()
    tiers.close()


def test_a_tier_that_the_rank_does_not_read_has_nothing_for_as_long() -> None:
    near, far = holding(1), holding(2)
    near.name, far.name = "near", "far"
    clock = Clock()
    tiers = TierLookups([TierLookup(tier, Counters()) for tier in (near, far)], clock)
    tiers.leave_alone({"near": 2.0})
    assert there(tiers, keys(1, 2)) == [False, True]
    assert near.calls_of("contains") == []
    clock.now += 2.0
    assert there(tiers, keys(1, 2)) == [True, True]
    tiers.leave_alone({"far": math.inf})
    clock.now += 1e9
    assert there(tiers, keys(1, 2)) == [True, False]
    tiers.leave_alone({})
    assert there(tiers, keys(1, 2)) == [True, True]
    tiers.close()


def test_the_scheduler_finds_what_a_worker_put_on_disk(tmp_path: Path) -> None:
    config = Config(local_disk=str(tmp_path), max_local_disk_size=0.1)
    info = RankInfo(0, "model", 1, num_layers=2, page_bytes=PAGE_BYTES, page_format="canonical")
    tiers = open_lower_tiers(config, info)
    assert there(tiers, keys(1)) == [False]
    (disk,) = open_tiers(TierSetup(config, 2, PAGE_BYTES, "canonical", Counters()))
    slab = torch.zeros(4 * 4096, dtype=torch.uint8)
    for layer in (1, 0):
        disk.put([LayerKey(key(1), layer)], [slab[:PAGE_BYTES]], 1.0)
    assert there(tiers, keys(1, 2)) == [True, False]
    disk.close()
    tiers.close()
