from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import wait

import numpy as np
import pytest
import torch
from storage.faulty_tier import LONG_S, Fault, FaultyTier, hanging
from storage.rig import NUM_LAYERS, Rig, key, keys, value, values

from lwkv.keys import LayerKey
from lwkv.storage import Missing, Status

MakeRig = Callable[..., Rig]


def test_lookup_counts_the_leading_chunks(rig: Rig) -> None:
    rig.store(1, 2, 4)
    assert [rig.lookup(*asked) for asked in [(), (1,), (1, 2, 3, 4), (3, 4), (4, 1)]] == [0, 1, 2, 0, 2]


def test_a_chunk_is_seen_only_when_all_its_layers_are_committed(rig: Rig, tier: FaultyTier) -> None:
    write = rig.begin(1)
    assert write is not None
    assert (rig.lookup(1), rig.manager.writes_in_flight) == (0, 1)
    write.commit()
    assert (rig.lookup(1), rig.manager.writes_in_flight) == (1, 0)
    assert not tier.calls_of("contains")[1:], "a chunk of the host tier needs no other"


def test_a_chunk_may_be_in_another_tier_than_its_neighbours(make_rig: MakeRig) -> None:
    disk, remote = FaultyTier("disk"), FaultyTier("remote")
    rig = make_rig(disk, remote)
    rig.put_below(disk, 2)
    rig.put_below(remote, 3, 4)
    rig.store(1, 5)
    disk.calls.clear()
    remote.calls.clear()
    assert rig.lookup(1, 2, 3, 4, 5, 6) == 5
    assert disk.calls_of("contains") == [keys(2, 3, 4, 6)]
    assert remote.calls_of("contains") == [keys(3, 4, 6)]
    hold = rig.hold(1, 2, 3, 4, 5, 6)
    assert rig.load(hold) == values(1, 2, 3, 4, 5)
    assert sorted(disk.calls_of("get")) == [[LayerKey(key(2), layer)] for layer in range(NUM_LAYERS)]
    hold.release()
    assert rig.host.contains(keys(1, 2, 3, 4, 5)) == [True] * 5


def test_pinned_chunks_are_unpinned_where_their_use_cannot_be_noted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.store(1, 2)
    chunks = rig.host.pin_prefix(keys(1, 2))
    assert rig.host.pins == 2

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(rig.manager, "note_use", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        rig.manager.end_pinned(keys(1, 2), chunks)
    assert rig.host.pins == 0


def test_a_hold_of_host_memory_alone_asks_no_tier(make_rig: MakeRig) -> None:
    disk = FaultyTier("disk")
    rig = make_rig(disk)
    rig.put_below(disk, 3)
    rig.store(1, 2)
    disk.calls.clear()
    hold = rig.manager.hold(keys(1, 2, 3), 1, in_host=True)
    assert [item.key for item in hold.found] == keys(2)
    assert rig.load(hold) == values(2)
    hold.release()
    assert not disk.calls_of("contains")
    assert not disk.calls_of("get")


def test_chunks_in_host_memory_are_pinned_until_release(rig: Rig) -> None:
    rig.store(1, 2, 4)
    hold = rig.hold(1, 2, 3, 4)
    assert rig.host.pins == 2, "what comes after a gap is not held"
    assert not rig.host.evict(2 * NUM_LAYERS)
    assert rig.host.evict(NUM_LAYERS)
    assert rig.host.contains(keys(1, 2, 4)) == [True, True, False]
    hold.release()
    hold.release()
    assert rig.host.pins == 0
    assert rig.host.evict(2 * NUM_LAYERS)


def test_two_holds_of_one_chunk_are_released_each_for_itself(rig: Rig) -> None:
    rig.store(1)
    first, second = rig.hold(1), rig.hold(1)
    first.release()
    first.release()
    assert rig.host.pins == 1
    assert not rig.host.evict(1)
    assert rig.load(second) == values(1)
    second.release()


def test_a_hold_finds_less_when_chunks_went_after_the_lookup(rig: Rig, tier: FaultyTier) -> None:
    tier.faults["put"] = Fault(drop=True)
    rig.store(1, 2)
    assert rig.lookup(1, 2) == 2
    rig.forget(2)
    hold = rig.hold(1, 2)
    assert rig.load(hold) == values(1)
    hold.release()


def test_a_hold_of_nothing_loads_nothing(rig: Rig) -> None:
    hold = rig.hold(1, 2)
    assert rig.load(hold) == [[]] * NUM_LAYERS
    hold.release()


def test_chunks_are_promoted_when_all_layers_have_arrived(rig: Rig, tier: FaultyTier) -> None:
    rig.put_below(tier, 1, 2)
    tier.faults["get", 1] = Fault(answer=lambda answers: [answers[0], Status.ERROR])
    hold = rig.hold(1, 2)
    arrived = [rig.values_of(rig.manager.layerwise_batched_get(hold, [layer])[0]) for layer in range(3)]
    assert arrived == [[value(1, 0), value(2, 0)], [value(1, 1), None], [value(1, 2), value(2, 2)]]
    assert rig.host.contains(keys(1, 2)) == [False, False]
    hold.release()
    assert rig.host.contains(keys(1, 2)) == [True, False]
    again = rig.hold(1, 2)
    assert rig.load(again) == values(1, 2)
    again.release()


def test_chunks_of_which_a_layer_was_not_asked_for_are_not_promoted(rig: Rig, tier: FaultyTier) -> None:
    rig.put_below(tier, 1)
    hold = rig.hold(1)
    wait(rig.manager.layerwise_batched_get(hold, range(NUM_LAYERS - 1)), LONG_S)
    assert rig.pool.references == NUM_LAYERS - 1
    hold.release()
    assert (len(rig.host), rig.pool.references) == (0, 0)


def test_two_holds_that_fetch_the_same_chunk_leave_one_copy(rig: Rig, tier: FaultyTier) -> None:
    rig.put_below(tier, 1)
    holds = [rig.hold(1), rig.hold(1)]
    assert [rig.load(hold) for hold in holds] == [values(1)] * 2
    assert rig.pool.references == 2 * NUM_LAYERS
    for hold in holds:
        hold.release()
    assert rig.pool.references == NUM_LAYERS


def test_a_frozen_manager_loads_but_stores_and_promotes_nothing(rig: Rig, tier: FaultyTier) -> None:
    rig.put_below(tier, 1)
    rig.store(2)
    rig.manager.frozen = True
    assert rig.begin(3) is None
    hold = rig.hold(1, 2)
    assert rig.load(hold) == values(1, 2)
    hold.release()
    assert rig.host.contains(keys(1, 2)) == [False, True]
    rig.manager.frozen = False
    rig.store(3)


def test_loads_evict_what_is_not_pinned(make_rig: MakeRig, tier: FaultyTier) -> None:
    rig = make_rig(tier, num_chunks=2)
    rig.put_below(tier, 1)
    rig.store(2, 3)
    hold = rig.hold(1)
    assert rig.load(hold) == values(1)
    hold.release()
    assert rig.host.contains(keys(1, 2, 3)) == [True, True, False]


def test_loads_without_memory_are_missing_and_counted(make_rig: MakeRig, tier: FaultyTier) -> None:
    rig = make_rig(tier, num_chunks=2)
    rig.put_below(tier, 1)
    rig.store(2, 3)
    pinned, hold = rig.hold(2, 3), rig.hold(2, 1)
    assert rig.load(hold) == values(2, None)
    assert rig.counters.totals()["loads_without_memory"] == NUM_LAYERS
    hold.release()
    pinned.release()


def test_of_a_prefix_that_host_memory_does_not_hold_as_much_is_found_as_it_holds(tier: FaultyTier) -> None:
    larger, smaller = Rig(4, [tier]), Rig(3, [tier])
    larger.store(1, 2, 3, 4)
    assert smaller.lookup(1, 2, 3, 4) == 3
    for _ in range(2):
        hold = smaller.hold(1, 2, 3, 4)
        assert smaller.load(hold) == values(1, 2, 3)
        hold.release()
    assert smaller.host.contains(keys(1, 2, 3)) == [True] * 3
    assert "loads_without_memory" not in smaller.counters.totals()
    for rig in (smaller, larger):
        rig.end()


def test_memory_that_cannot_be_page_locked_leaves_chunks_to_later_writes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(num_bytes: int) -> torch.Tensor:
        raise RuntimeError("no context")

    with monkeypatch.context() as broken:
        broken.setattr(rig.pool._platform, "alloc_pinned", fail)
        with pytest.raises(RuntimeError, match="no context"):
            rig.begin(1)
    assert rig.manager.writes_in_flight == 0
    rig.store(1)
    assert rig.lookup(1) == 1


def test_two_writers_of_one_chunk_write_it_once(rig: Rig) -> None:
    first = rig.begin(1, 2)
    assert first is not None
    assert rig.begin(2, 1) is None
    second = rig.begin(2, 3)
    assert second is not None
    assert (second.keys, second.positions.tolist()) == (keys(3), [1])
    first.abort()
    third = rig.begin(1, 2, 3)
    assert third is not None
    assert (third.keys, third.positions.tolist()) == (keys(1, 2), [0, 1])
    third.commit()
    second.commit()
    assert rig.begin(1, 2, 3) is None
    hold = rig.hold(1, 2, 3)
    assert rig.load(hold) == values(1, 2, 3)
    hold.release()


def test_a_write_given_up_leaves_its_chunks_to_others_and_keeps_its_pages_until_it_is_aborted(
    rig: Rig,
) -> None:
    first = rig.begin(1, 2)
    assert first is not None
    first.give_up()
    assert rig.pool.references == 2 * NUM_LAYERS
    second = rig.begin(1, 2)
    assert second is not None
    first.abort()
    assert (rig.pool.references, rig.manager.writes_in_flight) == (2 * NUM_LAYERS, 2)
    assert rig.begin(1, 2) is None
    second.commit()
    assert rig.lookup(1, 2) == 2


def test_a_chunk_is_kept_from_the_begin_of_its_write_until_it_is_aborted_or_evicted(rig: Rig) -> None:
    rig.store(1)
    write = rig.begin(2)
    assert write is not None
    assert rig.manager.is_kept(keys(1, 2, 3)) == [True, None, False]
    write.abort()
    assert rig.manager.is_kept(keys(1, 2, 3)) == [True, False, False]


def test_a_chunk_named_twice_is_written_once(rig: Rig) -> None:
    write = rig.begin(1, 2, 1)
    assert write is not None
    assert (write.keys, write.positions.tolist()) == (keys(1, 2), [0, 1])
    write.abort()


def test_a_chunk_promoted_while_it_is_written_is_kept_once(rig: Rig, tier: FaultyTier) -> None:
    rig.put_below(tier, 1)
    hold = rig.hold(1)
    assert rig.load(hold) == values(1)
    write = rig.begin(1)
    assert write is not None
    hold.release()
    write.commit()
    assert rig.manager.wait_idle(LONG_S)
    assert rig.pool.references == NUM_LAYERS


def test_pages_of_a_layer_are_neighbours_in_an_empty_pool(make_rig: MakeRig) -> None:
    rig = make_rig(num_chunks=8)
    write = rig.begin(1, 2)
    assert write is not None
    assert write.pages.shape == (NUM_LAYERS, 2)
    assert np.diff(write.pages).tolist() == [[1]] * NUM_LAYERS
    write.abort()


def test_a_chunk_that_could_not_be_inserted_can_be_stored_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("not inserted")

    write = rig.begin(1)
    assert write is not None
    with monkeypatch.context() as broken:
        broken.setattr(rig.host, "insert", fail)
        with pytest.raises(RuntimeError, match="not inserted"):
            write.commit()
    assert rig.manager.writes_in_flight == 0
    rig.pool.release(write.pages.ravel())  # the host tier that raised has not taken them over
    rig.store(1)
    assert rig.lookup(1) == 1


def test_a_write_that_finds_no_memory_is_refused_and_claims_nothing(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(num_chunks=2)
    rig.store(1, 2)
    hold = rig.hold(1, 2)
    assert rig.begin(3, 4) is None
    assert caplog.messages == ["no room for 2 chunks in host memory: not stored"]
    assert rig.counters.totals() == {"stores_refused": 1, "chunks_refused": 2}
    assert rig.manager.writes_in_flight == 0
    assert rig.lookup(1, 2) == 2
    hold.release()
    rig.store(3, 4)
    assert rig.lookup(3, 4) == 2


def test_memory_is_made_by_evicting_the_least_recently_used(make_rig: MakeRig) -> None:
    rig = make_rig(num_chunks=3)
    rig.store(1, 2)
    rig.store(3)
    rig.hold(1).release()
    rig.store(4)
    assert rig.host.contains(keys(1, 2, 3, 4)) == [True, False, True, True]
    assert rig.host.evicted == 1


def test_a_closed_pool_gives_no_memory_and_no_endless_search(make_rig: MakeRig) -> None:
    rig = make_rig(num_chunks=2)
    rig.store(1)
    rig.pool.close()
    assert rig.manager.allocate(1) is None
    assert rig.begin(2) is None


def test_layer_0_is_put_last_and_by_itself(rig: Rig, tier: FaultyTier) -> None:
    rig.store(1)
    rig.store(2)
    puts = [[(k.chunk, k.layer) for k in put] for put in tier.calls_of("put")]
    assert puts == [[(key(n), layer) for layer in layers] for n in (1, 2) for layers in ((1, 2), (0,))]


def test_layer_0_is_put_only_for_chunks_whose_other_layers_are_there(rig: Rig, tier: FaultyTier) -> None:
    tier.faults["put", 0] = Fault(answer=lambda answers: [Status.ERROR, *answers[1:]])
    tier.faults["put", 1] = Fault(answer=lambda answers: [*answers[:-1], Status.MISS])
    for number in (1, 2, 3):
        rig.store(number)
    assert [put[0].chunk for put in tier.calls_of("put")] == keys(1, 2, 3, 3)
    assert rig.counters.totals() == {"faulty_put_error": 1, "faulty_put_miss": 1}
    rig.forget(1, 2, 3)
    assert [rig.lookup(number) for number in (1, 2, 3)] == [0, 0, 1]


@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize(
    "fault",
    [
        Fault(error=OSError("no space left")),
        Fault(answer=lambda answers: answers[:-1]),
        Fault(answer=lambda answers: None),
    ],
    ids=["raises", "one answer short", "None"],
)
def test_a_put_that_breaks_off_leaves_nothing_visible_below_and_can_be_made_again(
    rig: Rig, tier: FaultyTier, fault: Fault, call: int
) -> None:
    tier.faults["put", call] = fault
    rig.store(1)
    assert len(tier.calls_of("put")) == call + 1
    assert rig.counters.totals() == {"faulty_errors": 1}
    tier.pages = {k: page for k, page in tier.pages.items() if call == 0}
    rig.require_rest()
    rig.forget(1)
    assert rig.lookup(1) == 0
    rig.store(1, 2)
    rig.forget(1, 2)
    hold = rig.hold(1, 2)
    assert rig.load(hold) == values(1, 2)
    hold.release()


def test_pages_stay_as_they_are_until_a_slow_tier_has_read_them(make_rig: MakeRig, tier: FaultyTier) -> None:
    rig = make_rig(tier, num_chunks=2)
    slow, other = hanging(), hanging()
    tier.faults["put", 0], tier.faults["put", 1] = slow, other
    rig.commit(1)
    assert slow.entered.wait(LONG_S)
    assert rig.pool.references == 2 * NUM_LAYERS
    rig.commit(2)
    assert rig.begin(3, 4) is None, "chunks being read are not evicted"
    assert rig.lookup(1, 2) == 2
    tier.end_faults()
    assert rig.manager.wait_idle(LONG_S)
    rig.store(3, 4)
    hold = rig.hold(1, 2)
    assert rig.load(hold) == values(1, 2)
    hold.release()


def test_threads_find_the_bytes_they_expect_under_pressure(make_rig: MakeRig) -> None:
    disk, remote = FaultyTier("disk"), FaultyTier("remote")
    rig = make_rig(disk, remote, num_chunks=6)
    flaky = np.random.default_rng(5)
    for name in ("get", "put"):
        for call in flaky.choice(400, 60, replace=False).tolist():
            disk.faults[name, call] = Fault(answer=lambda answers: [Status.ERROR, *answers[1:]])
            remote.faults[name, call + 1] = Fault(answer=lambda answers: [Status.MISS] * len(answers))
    faults: list[str] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(60):
            first = int(random.integers(12))
            numbers = list(range(first, first + int(random.integers(1, 4))))
            write = rig.begin(*numbers)
            if write is not None:
                (write.commit if random.random() < 0.8 else write.abort)()
            hold = rig.hold(*numbers)
            for layer, row in enumerate(rig.load(hold)):
                wrong = [
                    n for n, got in zip(numbers, row, strict=False) if got not in (None, value(n, layer))
                ]
                faults.extend(f"layer {layer} of chunk {n}" for n in wrong)
            hold.release()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert rig.host.evicted > 0
    rig.require_rest()


@pytest.mark.parametrize("reason", Missing)
def test_missing_marks_no_page(rig: Rig, reason: Missing) -> None:
    with pytest.raises(ValueError, match="not in use"):
        rig.pool.release(np.array([reason]))


def test_each_page_that_is_missing_says_why(make_rig: MakeRig, tier: FaultyTier) -> None:
    rig = make_rig(tier)
    rig.put_below(tier, 1, 2)
    rig.store(3)
    tier.faults["get", 0] = Fault(answer=lambda answers: [Status.MISS, Status.ERROR])
    tier.faults["get", 1] = Fault(error=OSError("gone"))
    hold = rig.hold(1, 2, 3)
    assert hold.host_pages(0)[:2].tolist() == [Missing.LATE] * 2, "nothing has arrived yet"
    pages = []
    for layer in range(NUM_LAYERS):
        taken = rig.manager.allocate(rig.pool.available) if layer == NUM_LAYERS - 1 else None
        [future] = rig.manager.layerwise_batched_get(hold, [layer])
        pages.append(future.result(LONG_S).pages[:2].tolist())
    assert pages == [[Missing.MISS, Missing.ERROR], [Missing.ERROR] * 2, [Missing.NO_MEMORY] * 2]
    assert taken is not None
    rig.pool.release(taken)
    hold.release()


# What finds no room.


def test_of_a_write_that_does_not_fit_the_first_chunks_are_kept(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(num_chunks=3)
    rig.store(1)
    hold = rig.hold(1)
    write = rig.begin(2, 1, 3, 4, 5)
    assert write is not None
    assert (write.keys, write.positions.tolist()) == (keys(2, 3), [0, 2])
    assert rig.manager.writes_in_flight == 2
    assert caplog.messages == ["no room for 2 chunks in host memory: not stored"]
    assert rig.counters.totals() == {"stores_refused": 1, "chunks_refused": 2}
    write.commit()
    hold.release()
    assert rig.lookup(1, 2, 3, 4) == 3


def test_room_for_a_write_is_never_made_from_the_chunks_before_it(make_rig: MakeRig) -> None:
    rig = make_rig(num_chunks=4)
    rig.store(1, 2)
    rig.store(8, 9)
    write = rig.begin(1, 2, 3, 4, 5)
    assert write is not None
    assert write.keys == keys(3, 4)
    write.commit()
    assert rig.lookup(1, 2, 3, 4) == 4
    assert rig.begin(1, 2, 3, 4, 5) is None
    assert rig.lookup(1, 2, 3, 4) == 4


def test_a_pool_without_room_says_so_once_a_minute_and_recovers(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(num_chunks=2)
    rig.store(1, 2)
    hold = rig.hold(1, 2)
    for number in range(3, 1003):
        assert rig.begin(number) is None
    assert len(caplog.messages) == 1
    assert rig.counters.totals()["chunks_refused"] == 1000
    rig.clock.now += 60
    assert rig.begin(3) is None
    assert caplog.messages[1:] == [
        "no room for 1 chunks in host memory: not stored (999 more lines like this were left out)"
    ]
    hold.release()
    rig.store(3, 4)
    assert rig.lookup(3, 4) == 2


def test_pages_are_there_again_as_soon_as_their_holder_is_done_without_anyone_asking(rig: Rig) -> None:
    """Room is worked out from what is held now, not from what was held when something last asked."""
    rig.store(*range(8))
    hold = rig.hold(*range(8))
    assert (rig.pool.available, rig.host.evictable()) == (0, 0)
    hold.release()
    assert (rig.pool.available, rig.host.evictable()) == (0, 8 * NUM_LAYERS)
    write = rig.begin(*range(10, 18))
    assert write is not None
    assert len(write.keys) == 8
    write.abort()
    assert rig.pool.available == 8 * NUM_LAYERS


def test_a_hold_whose_chunks_cannot_be_kept_by_a_nearer_tier_keeps_no_pin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near, far = FaultyTier("near"), FaultyTier("far")
    rig = Rig(tiers=[near, far])
    rig.store(1)
    rig.put_below(far, 2)
    hold = rig.hold(1, 2)
    rig.load(hold)

    def refuse(*_: object) -> None:
        raise KeyError("the guard itself fails, says the test")

    with monkeypatch.context() as refused:
        refused.setattr(rig.manager.lower.guards[0], "put", refuse)
        with pytest.raises(KeyError):
            hold.release()
    rig.require_rest()
    assert rig.host.pins == 0
    rig.end()


@pytest.mark.parametrize("broken", [0, 1])
def test_a_tier_that_cannot_be_given_chunks_leaves_them_visible_and_nothing_held(
    broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tiers=[FaultyTier(), FaultyTier()])

    def refuse(*_: object) -> None:
        raise KeyError("the guard itself fails, says the test")

    with monkeypatch.context() as refused:
        refused.setattr(rig.manager.lower.guards[broken], "put", refuse)
        write = rig.begin(1, 2)
        assert write is not None
        with pytest.raises(KeyError):
            write.commit()
        assert rig.lookup(1, 2) == 2
        rig.require_rest()
    rig.end()


def test_pages_without_names_become_a_write_of_those_chunks_that_nobody_else_writes(rig: Rig) -> None:
    unnamed = rig.manager.begin_unnamed_write(key(1), 3)
    assert unnamed is not None
    assert unnamed.pages.shape == (NUM_LAYERS, 3)
    assert (rig.manager.writes_in_flight, rig.pool.pages_in_use) == (0, 3 * NUM_LAYERS)
    other = rig.begin(2)
    write = rig.manager.begin_write(keys(1, 2, 3), unnamed=unnamed)
    assert other is not None
    assert write is not None
    assert write.positions.tolist() == [0, 2]
    assert write.pages.tolist() == unnamed.pages[:, [0, 2]].tolist()
    assert write.spare.ravel().tolist() == unnamed.pages[:, 1].tolist()
    write.commit()
    other.commit()
    assert rig.lookup(1, 2, 3) == 3
    assert (rig.manager.writes_in_flight, rig.pool.pages_in_use) == (0, 3 * NUM_LAYERS)


@pytest.mark.parametrize("end", ["abort", "lose"])
def test_pages_without_names_go_back_unless_a_device_may_write_to_them(rig: Rig, end: str) -> None:
    for is_named in (False, True):
        before, write = rig.pool.pages_in_use, rig.manager.begin_unnamed_write(key(1), 2)
        assert write is not None
        named = rig.manager.begin_write(keys(1, 2), unnamed=write) if is_named else write
        assert named is not None
        getattr(named, end)()
        kept = 0 if end == "abort" else 2 * NUM_LAYERS
        assert (rig.manager.writes_in_flight, rig.pool.pages_in_use) == (0, before + kept)
        if kept:
            rig.pool.release(write.pages.ravel())


def test_pages_without_names_are_given_for_prompts_only_of_which_nothing_is_known(rig: Rig) -> None:
    rig.store(1, 2)
    coming = rig.begin(5)
    assert coming is not None
    asked = [rig.manager.begin_unnamed_write(key(number), 1) for number in (1, 5)]
    rig.forget(1)
    asked.append(rig.manager.begin_unnamed_write(key(1), 1))
    rig.manager.frozen = True
    asked.append(rig.manager.begin_unnamed_write(key(7), 1))
    rig.manager.frozen = False
    coming.commit()
    asked.append(rig.manager.begin_unnamed_write(key(7), 9))
    assert asked == [None] * 5


def test_nobody_gets_pages_without_names_where_all_are_known_after_all(rig: Rig) -> None:
    unnamed = rig.manager.begin_unnamed_write(key(1), 1)
    assert unnamed is not None
    rig.store(1)
    assert rig.manager.begin_write(keys(1), unnamed=unnamed) is None
    unnamed.abort()
    assert rig.pool.pages_in_use == NUM_LAYERS
