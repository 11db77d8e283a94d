from __future__ import annotations

import pytest
from storage.faulty_tier import Fault, FaultyTier, hanging
from storage.rig import NUM_LAYERS, Rig, keys

from lwkv.storage import prefetch as module
from lwkv.storage.prefetch import Prefetches

NUMBERS = (1, 2, 3, 4, 5)


def below(num_chunks: int = 16, timeout_s: float = 20.0) -> tuple[Rig, FaultyTier, Prefetches]:
    """A rig whose tier has five chunks that are not in host memory."""
    tier = FaultyTier()
    rig = Rig(num_chunks, [tier], timeout_s)
    rig.store(*NUMBERS)
    rig.host.evict(rig.host.evictable())
    assert len(rig.host) == 0
    return rig, tier, Prefetches(rig.manager, NUM_LAYERS)


def settle(rig: Rig, prefetches: Prefetches) -> None:
    """Wait for groups of chunks, each of which begins the next."""
    for _ in range(2 * len(NUMBERS)):
        assert prefetches._jobs.wait_idle(20.0)
        assert rig.manager.wait_idle(20.0)


@pytest.mark.parametrize("at_a_time", [1, 2, 8])
def test_chunks_come_to_host_memory_once_and_stay_pinned_until_they_are_released(
    at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNKS_AT_A_TIME", at_a_time)
    rig, tier, prefetches = below()
    prefetches.begin(7, keys(*NUMBERS), 1)
    settle(rig, prefetches)
    assert prefetches.ended() == [7]
    assert prefetches.ended() == []
    assert rig.host.contains(keys(*NUMBERS)) == [False, True, True, True, True]
    assert sum(map(len, tier.calls_of("get"))) == 4 * NUM_LAYERS
    assert rig.host.pins == 4
    prefetches.release(7)
    prefetches.release(7)
    assert rig.host.pins == 0
    rig.end()


def test_one_that_is_released_on_its_way_gives_everything_back() -> None:
    rig, tier, prefetches = below()
    tier.faults["get"] = fault = hanging()
    prefetches.begin(1, keys(*NUMBERS), 0)
    assert fault.entered.wait(20.0)
    prefetches.release(1)
    tier.end_faults()
    settle(rig, prefetches)
    assert rig.host.pins == 0
    rig.end()


@pytest.mark.parametrize("fault", [Fault(RuntimeError("down")), Fault(answer=lambda found: found[1:])])
@pytest.mark.parametrize("call", ["get", "contains"])
def test_one_that_fails_ends_and_holds_nothing(fault: Fault, call: str) -> None:
    rig, tier, prefetches = below()
    tier.faults[call] = fault
    prefetches.begin(1, keys(*NUMBERS), 0)
    settle(rig, prefetches)
    assert prefetches.ended() == [1]
    prefetches.release(1)
    assert (rig.host.pins, len(rig.host)) == (0, 0)
    rig.end()


def test_one_of_which_nothing_can_be_asked_ends_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, _, prefetches = below()

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patches:
        patches.setattr(rig.manager, "layerwise_batched_get", refuse)
        prefetches.begin(1, keys(*NUMBERS), 0)
        settle(rig, prefetches)
    assert prefetches.ended() == [1]
    assert rig.host.pins == 0
    rig.end()


def test_what_is_beyond_the_room_in_host_memory_is_left_out() -> None:
    rig, _, prefetches = below(num_chunks=5)
    pinned = rig.begin(20, 21, 22)
    assert pinned is not None
    prefetches.begin(1, keys(*NUMBERS), 0)
    settle(rig, prefetches)
    assert prefetches.ended() == [1]
    assert rig.host.pins <= 2
    prefetches.close()
    assert rig.host.pins == 0
    pinned.abort()
    rig.end()


def test_after_the_end_one_ends_at_once() -> None:
    rig, _, prefetches = below()
    prefetches.close()
    prefetches.begin(1, keys(*NUMBERS), 0)
    assert prefetches.ended() == [1]
    rig.end()


def test_what_is_not_to_be_pinned_comes_and_holds_nothing() -> None:
    rig, _, prefetches = below()
    prefetches.begin(1, keys(*NUMBERS), 0, pins=False)
    settle(rig, prefetches)
    assert prefetches.ended() == [1]
    assert (rig.host.pins, len(rig.host)) == (0, 5)
    prefetches.release(1)
    rig.end()
