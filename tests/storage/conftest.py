from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from storage.faulty_tier import FaultyTier
from storage.rig import Rig


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Makes rigs; when the test has ended each must come to rest and give everything back."""
    rigs: list[Rig] = []

    def make(*tiers: FaultyTier, num_chunks: int = 8, **arguments: Any) -> Rig:
        rigs.append(Rig(num_chunks, tiers, **arguments))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.end()


@pytest.fixture
def tier() -> FaultyTier:
    return FaultyTier()


@pytest.fixture
def rig(make_rig: Callable[..., Rig], tier: FaultyTier) -> Rig:
    """Eight chunks of host memory above one tier."""
    return make_rig(tier)
