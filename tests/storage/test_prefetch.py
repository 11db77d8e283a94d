from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from storage.faulty_tier import Fault, FaultyTier, hanging
from storage.rig import NUM_LAYERS, Rig, key, keys

from lwkv.keys import ChunkKey
from lwkv.storage import chunk_parts
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
    return rig, tier, Prefetches(rig.manager)


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


class OrderedTier(FaultyTier):
    """Also notes of which prompts it was said that they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.followed: list[list[ChunkKey]] = []

    def follow(self, prompt: Sequence[ChunkKey], deadline_s: float) -> None:
        self.followed.append(list(prompt))


@pytest.mark.parametrize("layers_a_read", [1, 2, NUM_LAYERS])
def test_a_chunk_takes_few_calls_of_neighbouring_layers(
    layers_a_read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call wakes threads, which take the interpreter from the one that launches kernels."""
    monkeypatch.setattr(chunk_parts, "BYTES_A_READ", layers_a_read * 4096 + 1)
    rig, tier, prefetches = below()
    prefetches.begin(1, keys(*NUMBERS), 0)
    settle(rig, prefetches)
    calls = tier.calls_of("get")
    assert len(calls) == len(NUMBERS) * -(-NUM_LAYERS // layers_a_read)
    assert all(len({key.chunk for key in call}) == 1 for call in calls)
    prefetches.release(1)
    rig.end()


def test_a_tier_learns_once_that_a_prompt_is_used_however_many_groups_it_is_fetched_in() -> None:
    tier = OrderedTier()
    rig = Rig(16, [tier])
    rig.store(*NUMBERS)
    rig.host.evict(rig.host.evictable())
    tier.followed.clear()
    prefetches = Prefetches(rig.manager)
    prefetches.begin(1, keys(*NUMBERS), 0)
    settle(rig, prefetches)
    assert prefetches.ended() == [1]
    assert tier.followed == [keys(*NUMBERS)]
    prefetches.release(1)
    rig.end()


def test_one_that_is_stopped_reads_no_more_than_is_being_read_and_keeps_what_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "GROUPS_AT_ONCE", 1)
    rig, tier, prefetches = below()
    tier.faults["get", 2] = fault = hanging()
    prefetches.begin(1, keys(*NUMBERS), 0)
    assert fault.entered.wait(20.0)
    prefetches.stop(1)
    tier.end_faults()
    settle(rig, prefetches)
    assert prefetches.ended() == [1]
    assert rig.host.contains(keys(1, 2, 5)) == [True, True, False], "two groups had begun"
    assert key(5) not in {each.chunk for call in tier.calls_of("get") for each in call}
    assert rig.host.pins >= 2
    prefetches.release(1)
    assert rig.host.pins == 0
    rig.end()


def test_one_that_is_stopped_before_its_turn_ends_and_lets_the_next_one_begin() -> None:
    rig, tier, prefetches = below()
    tier.faults["get"] = fault = hanging()
    prefetches.begin(1, keys(1, 2), 0)
    prefetches.begin(2, keys(3), 0)
    prefetches.stop(2)
    prefetches.stop(7)
    assert prefetches.ended() == [2]
    assert fault.entered.wait(20.0)
    tier.end_faults()
    prefetches.begin(3, keys(4, 5), 0)
    settle(rig, prefetches)
    assert sorted(prefetches.ended()) == [1, 3], "the calls of both may be under way at once"
    assert rig.host.contains(keys(*NUMBERS)) == [True, True, False, True, True]
    prefetches.close()
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
        patches.setattr(rig.manager, "batched_get", refuse)
        prefetches.begin(1, keys(*NUMBERS), 0)
        settle(rig, prefetches)
    assert prefetches.ended() == [1]
    assert rig.host.pins == 0
    rig.end()


@pytest.mark.parametrize("num_asked", range(NUM_LAYERS))
def test_one_whose_chunk_cannot_be_asked_for_whole_holds_no_page_of_it(
    num_asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_parts, "BYTES_A_READ", 1)  # a call for each layer
    rig, _, prefetches = below()
    [guard] = rig.manager.lower.guards
    get_layers, asked = guard.get_layers, list[Any]()

    def refuse_later(*call: Any) -> Any:
        if len(asked) == num_asked:
            raise RuntimeError("can't start new thread")
        asked.append(call)
        return get_layers(*call)

    with monkeypatch.context() as patches:
        patches.setattr(guard, "get_layers", refuse_later)
        prefetches.begin(1, keys(*NUMBERS), 0)
        settle(rig, prefetches)
    assert prefetches.ended() == [1]
    assert len(asked) == num_asked
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
