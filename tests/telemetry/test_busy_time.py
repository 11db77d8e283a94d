from __future__ import annotations

from storage.rig import Clock

from lwkv.telemetry.busy_time import BusyTime


def test_calls_beside_each_other_count_once_and_pauses_do_not() -> None:
    clock = Clock()
    busy = BusyTime(clock)
    busy.begin()
    clock.now += 1
    busy.begin()
    clock.now += 1
    busy.end(10)
    clock.now += 1
    busy.end(20)
    assert busy.totals() == (30, 3.0)
    clock.now += 100
    busy.begin()
    clock.now += 2
    busy.end(0)
    assert busy.totals() == (30, 5.0)
