"""When lower tiers get chunks: at once, later, or because a tier below them was found to have one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from storage.faulty_tier import LONG_S, Fault, FaultyTier, hanging
from storage.rig import NUM_LAYERS, Rig, key, keys, values

from lwkv.storage import Status
from lwkv.storage.guard import NUM_WRITERS

MakeRig = Callable[..., Rig]


def have(tier: FaultyTier, *numbers: int) -> list[int]:
    """Which of these chunks `tier` has."""
    there = tier._inner.contains(keys(*numbers), LONG_S)
    return [number for number, found in zip(numbers, there, strict=True) if found]


def settle_begun(rig: Rig) -> None:
    """Wait for what is being written, without asking for more."""
    assert rig.manager.lower.wait_idle(LONG_S)


def test_chunks_are_written_at_once(rig: Rig, tier: FaultyTier) -> None:
    rig.commit(1, 2)
    settle_begun(rig)
    assert have(tier, 1, 2) == [1, 2]


def test_written_back_chunks_wait_until_they_have_half_of_host_memory(
    make_rig: MakeRig, tier: FaultyTier
) -> None:
    rig = make_rig(tier, num_chunks=8, write_back=True)
    rig.commit(1, 2)
    rig.commit(3, 4)
    settle_begun(rig)
    assert have(tier, 1, 2, 3, 4) == []
    rig.commit(5, 6)
    settle_begun(rig)
    assert have(tier, 1, 2, 3, 4, 5, 6) == [1, 2], "those stored longest ago"
    assert rig.lookup(1, 2, 3, 4, 5, 6) == 6
    assert rig.manager.wait_idle(LONG_S)
    assert have(tier, 1, 2, 3, 4, 5, 6) == [1, 2, 3, 4, 5, 6]


def test_what_has_not_been_written_is_not_evicted(make_rig: MakeRig, tier: FaultyTier) -> None:
    rig = make_rig(tier, num_chunks=4, write_back=True)
    rig.commit(1, 2)
    assert rig.manager.allocate(3 * NUM_LAYERS) is None
    assert rig.lookup(1, 2) == 2
    assert rig.manager.wait_idle(LONG_S)
    pages = rig.manager.allocate(3 * NUM_LAYERS)
    assert pages is not None
    rig.pool.release(pages)
    assert rig.lookup(1, 2) == 2, "one of them is only below now"


def test_a_store_that_finds_no_room_has_the_rest_written(make_rig: MakeRig, tier: FaultyTier) -> None:
    rig = make_rig(tier, num_chunks=2, write_back=True)
    rig.commit(1)
    held = rig.pool.allocate(NUM_LAYERS)
    assert held is not None
    assert rig.begin(2) is None
    settle_begun(rig)
    assert have(tier, 1) == [1]
    rig.store(3)
    assert [rig.host.contains(keys(number)) for number in (1, 3)] == [[False], [True]]
    rig.pool.release(held)


def test_a_load_that_finds_no_room_has_the_rest_written(make_rig: MakeRig, tier: FaultyTier) -> None:
    rig = make_rig(tier, num_chunks=4, write_back=True)
    rig.store(1, 2, 3)
    rig.forget(1, 2, 3)
    rig.commit(4, 5)
    hold = rig.hold(1, 2, 3)
    assert rig.load(hold) != values(1, 2, 3)
    hold.release()
    settle_begun(rig)
    assert have(tier, 4, 5) == [4, 5]
    again = rig.hold(1, 2, 3)
    assert rig.load(again) == values(1, 2, 3)
    again.release()


def test_close_writes_what_has_not_been_written(tier: FaultyTier) -> None:
    rig = Rig(8, [tier], write_back=True)
    rig.commit(1, 2)
    assert rig.manager.close(LONG_S)
    assert have(tier, 1, 2) == [1, 2]
    assert rig.pool.references == 0


def test_close_gives_everything_back_though_nothing_can_be_written(tier: FaultyTier) -> None:
    rig = Rig(8, [tier], write_back=True)
    tier.faults["put"] = Fault(error=OSError("full"))
    rig.commit(1, 2, 3)
    assert rig.manager.close(LONG_S)
    assert (have(tier, 1, 2, 3), rig.pool.references) == ([], 0)


def test_what_is_committed_after_close_is_kept_by_nobody(tier: FaultyTier) -> None:
    rig = Rig(8, [tier], write_back=True)
    write = rig.begin(1)
    assert write is not None
    rig.manager.close(LONG_S)
    write.commit()
    assert (have(tier, 1), rig.pool.references) == ([], 0)


def test_a_chunk_that_was_written_in_vain_can_go(make_rig: MakeRig, tier: FaultyTier) -> None:
    rig = make_rig(tier, num_chunks=2, write_back=True)
    tier.faults["put"] = Fault(error=OSError("full"))
    rig.store(1, 2)
    rig.clock.now += 1000
    tier.end_faults()
    rig.store(3)
    assert rig.lookup(3) == 1
    assert have(tier, 1, 2, 3) == [3]


def test_what_a_late_tier_did_not_take_stays_to_be_written(make_rig: MakeRig, tier: FaultyTier) -> None:
    rig = make_rig(tier, num_chunks=16, write_back=True)
    numbers = range(1, NUM_WRITERS + 3)
    hung = tier.faults["put"] = hanging()
    rig.commit(*numbers)
    assert not rig.manager.wait_idle(0)
    assert hung.entered.wait(LONG_S)
    rig.clock.now += LONG_S
    assert rig.manager.totals()["faulty_resting"] == 1
    assert "faulty_skipped" not in rig.counters.totals(), "nobody asked for anything since"
    assert not rig.manager.lower.guards[0]._writes.is_answering()
    skipped = rig.counters.totals()["faulty_skipped"]
    assert skipped >= 2
    tier.end_faults()
    settle_begun(rig)
    assert len(have(tier, *numbers)) == len(numbers) - skipped
    assert rig.manager.wait_idle(LONG_S)
    assert have(tier, *numbers) == list(numbers)


def rest(rig: Rig, tier: FaultyTier) -> None:
    """Have the tier fail twice, so that it rests."""
    tier.faults["put"] = Fault(error=OSError("full"))
    rig.store(101)
    rig.store(102)
    assert not rig.manager.wait_idle(LONG_S)
    tier.end_faults()


@pytest.mark.parametrize("num_failed", [1, NUM_LAYERS - 1])
@pytest.mark.parametrize("status", [Status.MISS, Status.ERROR, None])
def test_what_a_tier_failed_to_take_is_reported_once(
    rig: Rig, tier: FaultyTier, status: Status | None, num_failed: int
) -> None:
    failed = [status] * num_failed
    tier.faults["put", 0] = Fault(answer=lambda answers: [*failed, *answers[num_failed:]])
    rig.commit(1)
    assert not rig.manager.wait_idle(LONG_S)
    assert rig.manager.wait_idle(LONG_S), "which was told"
    rig.commit(2)
    assert rig.manager.wait_idle(LONG_S)
    assert have(tier, 1, 2) == [2]


def test_what_one_of_two_tiers_failed_to_take_is_reported_though_the_other_has_it(make_rig: MakeRig) -> None:
    disk, remote = FaultyTier("disk"), FaultyTier("remote")
    rig = make_rig(disk, remote)
    rig.put_below(remote, 1)
    disk.faults["put"] = Fault(error=OSError("full"))
    hold = rig.hold(1)
    assert rig.load(hold) == values(1)
    hold.release()
    assert not rig.manager.wait_idle(LONG_S)
    assert (have(disk, 1), have(remote, 1)) == ([], [1])


def test_what_a_resting_tier_did_not_take_is_reported_once(rig: Rig, tier: FaultyTier) -> None:
    rest(rig, tier)
    rig.commit(1)
    assert not rig.manager.wait_idle(LONG_S)
    assert rig.manager.wait_idle(LONG_S), "which was told"
    rig.clock.now += 1000
    rig.commit(2)
    assert rig.manager.wait_idle(LONG_S)
    assert have(tier, 1, 2) == [2], "nobody keeps 1 to be written"


def test_what_a_resting_tier_did_not_take_is_written_back_later(make_rig: MakeRig, tier: FaultyTier) -> None:
    rig = make_rig(tier, write_back=True)
    rest(rig, tier)
    rig.commit(1)
    for _ in range(2):
        assert not rig.manager.wait_idle(LONG_S)
    rig.clock.now += 1000
    assert rig.manager.wait_idle(LONG_S)
    assert have(tier, 1) == [1]


def test_what_is_written_back_to_a_resting_tier_keeps_half_of_host_memory_at_most(
    make_rig: MakeRig, tier: FaultyTier
) -> None:
    rig = make_rig(tier, num_chunks=4, write_back=True)
    rest(rig, tier)
    for number in (1, 2, 3):
        rig.commit(number)
    pages = rig.manager.allocate(2 * NUM_LAYERS)
    assert pages is not None
    rig.pool.release(pages)
    rig.clock.now += 1000
    assert not rig.manager.wait_idle(LONG_S), "1 was given up"
    assert rig.manager.wait_idle(LONG_S), "which was told"
    assert have(tier, 1, 2, 3) == [2, 3]


@pytest.mark.parametrize("write_back", [False, True])
def test_what_is_found_in_a_far_tier_is_kept_in_the_nearer_ones(make_rig: MakeRig, write_back: bool) -> None:
    disk, remote = FaultyTier("disk"), FaultyTier("remote")
    rig = make_rig(disk, remote, write_back=write_back)
    rig.put_below(remote, 1)
    puts = len(remote.calls_of("put"))
    hold = rig.hold(1)
    assert rig.load(hold) == values(1)
    hold.release()
    assert rig.manager.wait_idle(LONG_S)
    assert (have(disk, 1), len(remote.calls_of("put"))) == ([1], puts)
    rig.forget(1)
    again = rig.hold(1)
    assert rig.load(again) == values(1)
    again.release()
    totals = rig.manager.totals()
    assert (totals["disk_hits"], totals["remote_hits"]) == (1, 1)


def test_a_frozen_cache_keeps_nothing_of_what_it_loads(make_rig: MakeRig) -> None:
    disk, remote = FaultyTier("disk"), FaultyTier("remote")
    rig = make_rig(disk, remote)
    rig.put_below(remote, 1)
    rig.manager.frozen = True
    hold = rig.hold(1)
    assert rig.load(hold) == values(1)
    hold.release()
    rig.require_rest()
    assert (have(disk, 1), len(rig.host)) == ([], 0)


def test_without_host_memory_pages_only_pass_through(make_rig: MakeRig) -> None:
    disk, remote = FaultyTier("disk"), FaultyTier("remote")
    rig = make_rig(disk, remote, num_chunks=2, keep_in_host=False)
    slow = disk.faults["put", 0] = hanging()
    rig.commit(1)
    assert slow.entered.wait(LONG_S)
    assert rig.manager.lower.guards[1].wait_idle(LONG_S)
    assert (rig.lookup(1), len(rig.host)) == (1, 0), "it is where it has arrived"
    disk.end_faults()
    for number in (2, 3, 4):
        rig.store(number)
    assert (len(rig.host), rig.pool.references) == (0, 0)
    hold = rig.hold(1, 2)
    assert rig.load(hold) == values(1, 2)
    hold.release()
    assert rig.pool.references == 0
    for layer_key in key(3).split_layers(NUM_LAYERS):
        del disk.pages[layer_key]
    hold = rig.hold(3)
    assert rig.load(hold) == values(3)
    hold.release()
    assert rig.manager.wait_idle(LONG_S)
    assert have(disk, 3) == [3]
