from __future__ import annotations

import numpy as np
import pytest

from lwkv.integrations.vllm.scheduler.lookup.patience import LATER, MORE, Patience, Wait
from lwkv.storage.tier import HOST

CHUNK_S, STEP_S = 0.01, 0.004
NUM_CHUNKS = 8


class Waiting(Wait):
    """For eight chunks, of which `there` says which have come; each takes 10 ms to be computed."""

    def __init__(self, each_s: float = 0.0, in_host: int = 0, queue_s: float = 0.0) -> None:
        self.there = set(range(3, 3 + in_host))
        left = CHUNK_S * np.arange(NUM_CHUNKS + 1.0, 0, -1)
        promised = np.maximum(np.arange(NUM_CHUNKS + 1.0) - in_host, 0) * each_s
        promised[in_host + 1 :] += queue_s
        tiers = [HOST] * in_host + ["disk"] * (NUM_CHUNKS - in_host)
        super().__init__(Patience(left, promised, STEP_S), self.there.__contains__, 3, tiers, 100.0)

    def lasts_s(self) -> float:
        """How long it lasts if nothing more comes."""
        waited = 0.0
        while not self.is_over(100.0 + waited):
            waited += 0.0001
        return waited


def test_a_tier_whose_speed_is_not_known_is_waited_for_a_little() -> None:
    wait = Waiting()
    assert wait.lasts_s() == pytest.approx(STEP_S / 2, abs=0.0002)
    assert (wait.num_there, wait.num_wanted, wait.tiers_missing) == (0, NUM_CHUNKS, {"disk"})
    assert wait.is_in_vain


def test_what_has_come_is_worth_as_long_a_wait_as_it_saves() -> None:
    wait = Waiting()
    wait.there |= {3, 4, 6}
    total = CHUNK_S * (NUM_CHUNKS + 1)
    assert wait.lasts_s() == pytest.approx(2 * CHUNK_S + MORE * total - STEP_S, abs=0.0002)
    assert (wait.num_there, wait.is_in_vain) == (2, False)


def test_what_was_in_host_memory_at_first_is_worth_no_wait() -> None:
    assert Waiting(in_host=5).lasts_s() <= STEP_S / 2 + 0.0002


def test_a_tier_may_take_as_long_as_was_estimated_and_a_little_longer() -> None:
    assert Waiting(0.005).lasts_s() == pytest.approx(LATER * 2 * 0.005, abs=0.0002)
    assert Waiting(0.005, queue_s=0.1).lasts_s() == pytest.approx(LATER * 0.11, abs=0.0002)


def test_the_last_chunks_are_not_waited_for_longer_than_they_take_to_be_computed() -> None:
    wait = Waiting(0.001)
    wait.there |= set(range(3, 9))
    assert wait.is_over(100.02) is False
    assert wait.moved_at == 100.02
    assert wait.is_over(100.02 + LATER * 0.002 + CHUNK_S) is False
    assert wait.is_over(100.02 + LATER * 0.002 + 2 * CHUNK_S + STEP_S + 0.0002)
