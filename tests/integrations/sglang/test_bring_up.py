from __future__ import annotations

from storage.faulty_tier import FaultyTier, hanging
from storage.rig import Rig, key, keys

from lwkv.integrations.sglang.bring_up import BringUp


def test_chunks_that_came_in_time_are_kept_though_another_one_did_not() -> None:
    tier = FaultyTier()
    rig = Rig(16, [tier])
    rig.store(1, 2, 3)
    rig.host.evict(rig.host.evictable())
    tier.faults["get", 2] = fault = hanging()
    bring_up = BringUp(rig.manager, 0.3)
    assert bring_up.ask("model", [key(number).hash.hex() for number in (1, 2, 3)], 0)
    assert fault.entered.wait(20.0)
    assert bring_up.wait_idle(20.0)
    assert sum(rig.host.contains(keys(1, 2, 3))) == 2
    tier.end_faults()
    assert bring_up.close(20.0)
    rig.end()
