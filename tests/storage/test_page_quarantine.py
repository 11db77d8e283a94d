"""Pages of tiers that write to them after their calls have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from storage.faulty_tier import LONG_S, Fault, FaultyTier, hanging
from storage.rig import NUM_LAYERS, Rig, values

from lwkv.keys import LayerKey
from lwkv.storage import Status

GRACE_S = 10.0
ENDINGS = {
    "raises": Fault(error=ConnectionError("gone")),
    "error": Fault(answer=lambda answers: [Status.ERROR] * len(answers)),
    "miss": Fault(answer=lambda answers: [Status.MISS] * len(answers)),
    "nonsense": Fault(answer=lambda answers: None),
}


class LateTier(FaultyTier):
    """Remembers the pages it was asked to fill, and writes to them when the test says so."""

    grace_s = GRACE_S

    def __init__(self) -> None:
        super().__init__("late")
        self.targets: list[torch.Tensor] = []

    def get(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> Any:
        self.targets.extend(pages)
        return super().get(keys, pages, deadline_s)

    def write_late(self) -> None:
        for page in self.targets:
            page.fill_(250)


@pytest.fixture
def late(make_rig: Callable[..., Rig]) -> tuple[Rig, LateTier]:
    tier = LateTier()
    rig = make_rig(tier, num_chunks=2)
    rig.put_below(tier, 1)
    return rig, tier


def fail_to_load(rig: Rig, number: int) -> None:
    hold = rig.hold(number)
    assert rig.load(hold) == values(None)
    hold.release()


@pytest.mark.parametrize("ending", ENDINGS)
def test_pages_of_a_call_that_failed_are_nobodys_until_its_time_of_grace_is_over(
    late: tuple[Rig, LateTier], ending: str
) -> None:
    rig, tier = late
    tier.faults["get"] = ENDINGS[ending]
    hold = rig.hold(1)
    [future] = rig.manager.layerwise_batched_get(hold, [0])
    assert rig.values_of(future) == [None]
    hold.release()
    assert rig.pool.references == len(tier.targets) == 1
    others = rig.pool.allocate(2 * NUM_LAYERS - 1)
    assert others is not None
    assert rig.pool.allocate(1) is None
    tier.write_late()
    rig.pool.release(others)
    tier.end_faults()
    rig.clock.now += GRACE_S - 0.25
    rig.lookup(2)
    assert rig.pool.references == 1
    rig.clock.now += 0.25
    rig.lookup(2)
    assert rig.pool.references == 0
    again = rig.hold(1)
    assert rig.load(again) == values(1)
    again.release()


def test_pages_that_were_filled_are_not_kept(late: tuple[Rig, LateTier]) -> None:
    rig, _ = late
    hold = rig.hold(1)
    assert rig.load(hold) == values(1)
    hold.release()
    assert rig.pool.references == NUM_LAYERS == len(rig.host) * NUM_LAYERS


def test_a_tier_that_is_closed_writes_no_more() -> None:
    tier = LateTier()
    rig = Rig(2, [tier])
    rig.put_below(tier, 1)
    tier.faults["get"] = ENDINGS["error"]
    fail_to_load(rig, 1)
    assert rig.pool.references == NUM_LAYERS
    assert rig.manager.close(LONG_S)
    assert rig.pool.references == 0


def test_a_tier_that_does_not_end_keeps_its_pages() -> None:
    tier = LateTier()
    rig = Rig(2, [tier])
    rig.put_below(tier, 1)
    tier.faults["get"] = ENDINGS["error"]
    tier.faults["close"] = hanging()
    fail_to_load(rig, 1)
    assert not rig.manager.close(0)
    assert rig.pool.references == NUM_LAYERS
    tier.end_faults()
