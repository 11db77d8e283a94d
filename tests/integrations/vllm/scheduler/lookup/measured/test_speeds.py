from __future__ import annotations

import pytest
from storage.rig import Clock

from lwkv.integrations.vllm.scheduler.lookup.measured.speeds import HALF_LIFE_S, Speed


def test_a_speed_follows_its_last_measurements_and_large_ones_count_for_more() -> None:
    clock = Clock()
    speed = Speed(clock)
    assert (speed.seconds_each, speed.per_second, speed.measured_at) == (0.0, 0, None)
    speed.add(100, 1.0)
    assert (speed.seconds_each, speed.per_second, speed.measured_at) == (0.01, 100, clock.now)
    speed.add(1, 1.0)
    assert 30 < speed.per_second < 60
    for _ in range(30):
        speed.add(10, 1.0)
    assert speed.seconds_each == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize(("units", "seconds"), [(0, 1.0), (1, 0.0), (1, -1.0)])
def test_what_took_no_time_or_was_nothing_is_no_measurement(units: int, seconds: float) -> None:
    speed = Speed()
    speed.add(units, seconds)
    assert speed.measured_at is None


def test_a_small_measurement_changes_little_and_an_old_one_counts_for_little() -> None:
    clock = Clock()
    speed = Speed(clock, whole=4.0)
    for _ in range(10):
        speed.add(4, 4.0)
    speed.add(0.25, 2.5)
    assert 1.0 < speed.seconds_each < 1.3
    clock.now += 5 * HALF_LIFE_S
    speed.add(0.25, 2.5)
    assert speed.seconds_each > 3.0
