from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engine.rig import prompt, store_in
from oracle import Dims, MemoryTier, Oracle

from lwkv.platforms import Platform


@pytest.fixture
def oracle(platform: Platform, device: torch.device) -> Oracle:
    return Oracle(platform, device, dims=Dims(blocks=32))


@pytest.fixture
def hanging(oracle: Oracle) -> Iterator[MemoryTier]:
    """A tier with prompt 1 that never answers while the test runs."""
    tier = MemoryTier()
    store_in(oracle, tier, [prompt(1, 16)])
    tier.gate.clear()
    yield tier
    tier.gate.set()
