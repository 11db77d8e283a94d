from __future__ import annotations

import numpy as np
import pytest
from storage.rig import Clock

from lwkv.integrations.vllm.scheduler.lookup.speeds import PrefillSpeed, Speed


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


def test_a_token_takes_what_the_nearest_position_took() -> None:
    speed = PrefillSpeed()
    assert not speed.is_known
    speed.add(100, 1000, 0.01)
    speed.add(20_000, 1000, 0.03)
    at = speed.seconds_at(np.array([0.0, 1000.0, 18_000.0, 1e6]))
    assert at.tolist() == pytest.approx([1e-5, 1e-5, 3e-5, 3e-5])
    assert speed.per_second() == 100_000
