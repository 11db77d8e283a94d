from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
from storage.rig import Clock, keys

from lwkv.keys import ChunkKey
from lwkv.storage.use_notes import MOST_NOTES, UseNotes
from lwkv.telemetry.counters import Counters

LONG_S = 20.0


class SlowTier:
    """A tier that learns of no more than one prompt before the gate is opened."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.error: Exception | None = None
        self.prompts: list[Sequence[ChunkKey]] = []

    def follow(self, prompt: Sequence[ChunkKey], deadline_s: float) -> None:
        self.prompts.append(prompt)
        self.entered.set()
        assert self.gate.wait(LONG_S)
        if self.error is not None:
            raise self.error


@pytest.fixture
def tier() -> Iterator[SlowTier]:
    tier = SlowTier()
    yield tier
    tier.gate.set()


def end(tier: SlowTier, notes: UseNotes) -> None:
    tier.gate.set()
    assert notes.calls.wait_idle(LONG_S)


def test_a_slow_tier_learns_of_the_prompts_used_last_and_the_others_are_counted(tier: SlowTier) -> None:
    counters = Counters()
    notes = UseNotes(tier, "slow", LONG_S, counters, Clock())
    notes.add(keys(0))
    assert tier.entered.wait(LONG_S)
    for number in range(1, 3 * MOST_NOTES + 1):
        notes.add(keys(number))
        assert len(notes._waiting) <= MOST_NOTES
    end(tier, notes)
    last = range(2 * MOST_NOTES + 1, 3 * MOST_NOTES + 1)
    assert tier.prompts == [keys(number) for number in (0, *last)]
    assert counters.totals() == {"slow_notes_dropped": 2 * MOST_NOTES}


def test_what_waits_for_a_tier_that_fails_is_skipped_and_later_prompts_are_not_mixed_up(
    tier: SlowTier,
) -> None:
    clock, counters = Clock(), Counters()
    notes = UseNotes(tier, "slow", LONG_S, counters, clock)
    tier.error = ConnectionError("gone")
    for number in range(5):
        notes.add(keys(number))
    end(tier, notes)
    assert tier.prompts == [keys(0), keys(1)]
    notes.add(keys(5))
    assert counters.totals() == {"slow_errors": 2, "slow_skipped": 4}
    tier.error = None
    clock.now += LONG_S
    notes.add(keys(6))
    end(tier, notes)
    assert tier.prompts == [keys(0), keys(1), keys(6)]
    assert not notes._waiting
