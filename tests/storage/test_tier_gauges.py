from __future__ import annotations

import threading

import pytest
from storage.faulty_tier import LONG_S, FaultyTier, MemoryPages

from lwkv.storage.tier_gauges import TierGauges
from lwkv.telemetry.counters import Counters


class Gauged(MemoryPages):
    """Tells how often it was asked; waits for `gate` before, and raises `error`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def gauges(self) -> dict[str, int]:
        self.asked += 1
        asked = self.asked
        self.gate.wait(LONG_S)
        if self.error is not None:
            raise self.error
        return {"asked": asked}


def gauges_of(tier: object, timeout_s: float = LONG_S) -> TierGauges:
    return TierGauges(tier, timeout_s, Counters(), lambda: 0.0)  # type: ignore[arg-type]


def test_they_are_known_from_the_start_and_renewed_after_they_were_looked_at() -> None:
    gauges = gauges_of(Gauged())
    assert gauges.known() == {"asked": 1}
    assert gauges.wait_idle(LONG_S)
    assert gauges.known() == {"asked": 2}
    assert gauges.close(LONG_S)


def test_what_is_waited_for_was_asked_after_the_wait_began() -> None:
    tier = Gauged()
    gauges = gauges_of(tier)
    tier.gate.clear()
    gauges.known()
    threading.Timer(0.05, tier.gate.set).start()
    gauges.wait_new(LONG_S)
    assert gauges.known() == {"asked": 3}
    assert gauges.close(LONG_S)


def test_while_the_tier_hangs_they_stay_what_they_were_and_it_is_not_asked_again() -> None:
    tier = Gauged()
    gauges = gauges_of(tier)
    tier.gate.clear()
    assert [gauges.known() for _ in range(5)] == [{"asked": 1}] * 5
    assert tier.asked <= 2
    assert not gauges.close(0.01)
    tier.gate.set()
    assert gauges.wait_idle(LONG_S)


def test_a_tier_that_hangs_from_the_start_is_waited_for_as_long_as_agreed() -> None:
    tier = Gauged()
    tier.gate.clear()
    gauges = gauges_of(tier, 0.01)
    assert gauges.known() == {}
    tier.gate.set()
    assert gauges.wait_idle(LONG_S)


@pytest.mark.parametrize("error", [OSError("gone"), KeyError("used_bytes"), TypeError("no number")])
def test_while_the_tier_fails_they_stay_what_they_were(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    tier = Gauged()
    gauges = gauges_of(tier)
    tier.error = error
    gauges.wait_new(LONG_S)
    assert gauges.known() == {"asked": 1}
    assert gauges.close(LONG_S)
    assert f"tier memory: gauge failed: {type(error).__name__}" in caplog.text


def test_a_tier_that_tells_nothing_is_not_asked() -> None:
    gauges = gauges_of(FaultyTier())
    gauges.wait_new(LONG_S)
    assert gauges.known() == {}
    assert gauges.close(LONG_S)
