"""How fast a new tier is read is known before a request waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from storage.faulty_tier import LONG_S, Fault, FaultyTier, hanging
from storage.rig import NUM_LAYERS, PAGE_BYTES, Rig, keys

from lwkv.keys import LayerKey
from lwkv.platforms.protocol import Int64s
from lwkv.storage import chunk_parts
from lwkv.storage.read_back import MOST_WRITTEN, NUM_CHUNKS

MakeRig = Callable[..., Rig]

FIRST = range(1, NUM_CHUNKS + 1)


@pytest.fixture
def rig(make_rig: MakeRig, tier: FaultyTier) -> Rig:
    """Room for all that is stored, and for as much as is read back."""
    return reading_back(make_rig(tier, num_chunks=MOST_WRITTEN + 2 * NUM_CHUNKS))


def reading_back(rig: Rig) -> Rig:
    rig.manager.lower.read_back_first()
    return rig


def write_beside_others(rig: Rig, number: int) -> None:
    """Store a chunk, and wait until it is written and noted, and what that has asked for is read."""
    [guard] = rig.manager.lower.guards
    [read_back] = rig.manager.lower._read_backs.values()
    noted, note = threading.Event(), read_back.note_written

    def note_written(*chunk: Any) -> None:
        note(*chunk)
        noted.set()

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(read_back, "note_written", note_written)
        rig.commit(number)
        assert noted.wait(LONG_S)
    assert guard._reads.wait_idle(LONG_S)


def bytes_read(rig: Rig) -> int:
    [(num_bytes, _)] = rig.manager.read_times().values()
    return num_bytes


def chunks_read(tier: FaultyTier) -> list[int]:
    """Their numbers, with one for each layer."""
    return [int.from_bytes(each.chunk.hash, "little") for call in tier.calls_of("get") for each in call]


def test_the_first_chunks_are_read_back_when_they_are_written(rig: Rig, tier: FaultyTier) -> None:
    for number in FIRST[:-1]:
        rig.store(number)
    assert bytes_read(rig) == 0
    rig.store(FIRST[-1])
    assert bytes_read(rig) == NUM_CHUNKS * NUM_LAYERS * PAGE_BYTES
    assert sorted(chunks_read(tier)) == sorted([*FIRST] * NUM_LAYERS)


def test_that_is_done_once(rig: Rig, tier: FaultyTier) -> None:
    for number in range(MOST_WRITTEN):
        rig.store(number)
    assert len(chunks_read(tier)) == NUM_CHUNKS * NUM_LAYERS


def test_a_chunk_takes_few_calls(rig: Rig, tier: FaultyTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_parts, "BYTES_A_READ", NUM_LAYERS * rig.pool.page_stride)
    rig.store(*FIRST)
    assert len(tier.calls_of("get")) == NUM_CHUNKS


def test_a_tier_that_was_read_before_is_not_read_for_that(rig: Rig, tier: FaultyTier) -> None:
    rig.store(1)
    rig.forget(1)
    hold = rig.hold(1)
    rig.load(hold)
    hold.release()
    rig.store(*range(2, 2 + NUM_CHUNKS))
    assert chunks_read(tier) == [1] * NUM_LAYERS


def test_nothing_is_evicted_for_that_and_a_later_chunk_has_it_done(
    make_rig: MakeRig, tier: FaultyTier
) -> None:
    rig = reading_back(make_rig(tier, num_chunks=2 * NUM_CHUNKS))
    rig.store(*FIRST, NUM_CHUNKS + 1)
    assert bytes_read(rig) == 0
    assert rig.manager.is_kept(keys(*FIRST)) == [True] * NUM_CHUNKS
    rig.forget(1, 2)
    rig.store(NUM_CHUNKS + 2)
    assert bytes_read(rig) == NUM_CHUNKS * NUM_LAYERS * PAGE_BYTES


def test_a_tier_that_is_being_written_is_not_read_before_it_has_got_many(rig: Rig, tier: FaultyTier) -> None:
    tier.faults["put", 0] = hanging()
    rig.commit(0)
    for number in range(1, MOST_WRITTEN):
        write_beside_others(rig, number)
    assert not tier.calls_of("get")
    write_beside_others(rig, MOST_WRITTEN)
    assert len(chunks_read(tier)) == NUM_CHUNKS * NUM_LAYERS


@pytest.mark.parametrize(
    "fault", [Fault(error=OSError("gone")), Fault(answer=lambda answers: answers[1:])], ids=["raises", "odd"]
)
def test_a_tier_that_fails_then_is_counted_and_holds_nothing(
    rig: Rig, tier: FaultyTier, fault: Fault
) -> None:
    tier.faults["get"] = fault
    rig.store(*FIRST)
    assert bytes_read(rig) == 0
    rig.require_rest()


def test_a_tier_that_hangs_then_keeps_its_pages_until_its_calls_have_ended(
    rig: Rig, tier: FaultyTier
) -> None:
    fault = tier.faults["get"] = Fault(gate=threading.Event())
    rig.commit(*FIRST)
    assert fault.entered.wait(LONG_S)
    assert rig.pool.pages_in_use == 2 * NUM_CHUNKS * NUM_LAYERS
    assert rig.lookup(*FIRST) == NUM_CHUNKS


@pytest.mark.parametrize("num_made", [0, 1])
def test_a_call_that_cannot_be_made_then_holds_no_page(
    rig: Rig, tier: FaultyTier, num_made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (guard,) = rig.manager.lower.guards
    real, calls = guard.get_layers, list[int]()

    def get_layers(layers: Sequence[LayerKey], pages: Int64s) -> Future[Int64s]:
        calls.append(len(pages))
        if len(calls) > num_made:
            raise MemoryError("no memory for a call")
        return real(layers, pages)

    monkeypatch.setattr(guard, "get_layers", get_layers)
    rig.store(*FIRST)
    assert len(calls) == num_made + 1
    rig.require_rest()


def test_without_being_asked_nothing_is_read(make_rig: MakeRig, tier: FaultyTier) -> None:
    rig = make_rig(tier, num_chunks=2 * MOST_WRITTEN)
    rig.store(*FIRST)
    assert not tier.calls_of("get")
