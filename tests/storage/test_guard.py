from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait

import pytest
import torch
from storage.faulty_tier import LONG_S, Fault, FaultyTier, hanging
from storage.rig import NUM_LAYERS, Rig, keys, value, values
from storage.servers import wait_until

from lwkv.keys import ChunkKey, LayerKey
from lwkv.storage import Missing, Status
from lwkv.storage.guard import NUM_READERS, NUM_WRITERS
from lwkv.telemetry.log_throttle import PERIOD_S

MakeRig = Callable[..., Rig]
BAD_ANSWERS = {
    "raises": Fault(error=ConnectionError("gone")),
    "one short": Fault(answer=lambda answers: answers[:-1]),
    "one too many": Fault(answer=lambda answers: [*answers, answers[0]]),
    "None": Fault(answer=lambda answers: None),
    "a number": Fault(answer=lambda answers: 3),
}
BAD_LOOKUPS = BAD_ANSWERS | {"statuses": Fault(answer=lambda answers: [Status.MISS] * len(answers))}


@pytest.mark.parametrize("name", BAD_LOOKUPS)
def test_a_tier_that_cannot_say_what_it_has_is_a_miss_and_the_next_one_is_asked(
    make_rig: MakeRig, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk, remote = FaultyTier("disk"), FaultyTier("remote")
    rig = make_rig(disk, remote)
    rig.put_below(disk, 2)
    rig.put_below(remote, 3)
    rig.store(1)
    disk.faults["contains", 0] = BAD_LOOKUPS[name]
    hold = rig.hold(1, 2, 3)
    assert len(hold.found) == rig.host.pins == 1
    assert rig.manager.wait_idle(LONG_S)
    assert rig.counters.totals() == {"disk_errors": 1}
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("tier disk: look-up failed: ")
    hold.release()
    assert rig.lookup(1, 2, 3) == 3


def test_a_tier_that_is_down_is_one_line_a_minute_whatever_is_asked_of_it(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FaultyTier("disk")
    rig = make_rig(disk)
    for name in ("contains", "get", "put"):
        disk.faults[name] = Fault(error=ConnectionError("refused"))
    for number in range(8):
        rig.commit(number)
        rig.lookup(number + 100)
        rig.manager.wait_idle(LONG_S)
    (line,) = caplog.messages  # of a write or a look-up, whichever came first
    assert line.endswith(" failed: ConnectionError: refused")
    assert rig.counters.totals()["disk_errors"] > 2
    # However often it failed, and so however long it is skipped: longer than that.
    rig.clock.now += 10 * PERIOD_S
    wait_until(lambda: rig.lookup(200) or len(caplog.messages) > 1, "the tier to be asked again")
    rig.lookup(201)
    (_, again) = caplog.messages
    assert re.match(r"tier disk: (look-up|write) failed: ConnectionError: refused \(", again)


def test_answers_that_are_only_nearly_bool_count_as_such(rig: Rig, tier: FaultyTier) -> None:
    rig.put_below(tier, 1, 3)
    tier.faults["contains"] = Fault(answer=lambda answers: tuple(int(there) for there in answers))
    assert rig.lookup(1, 2, 3) == 1


def test_a_lookup_waits_no_longer_than_agreed(
    make_rig: MakeRig, tier: FaultyTier, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(tier, timeout_s=0.01, clock=time.monotonic)
    tier.faults["contains"] = hanging()
    assert rig.lookup(1) == 0
    assert caplog.messages == ["tier faulty: no answer to a look-up within 0.01 s: skipped until it answers"]
    assert rig.counters.totals()["faulty_timeouts"] == 1


def test_no_lookup_waits_for_a_tier_that_is_late(
    make_rig: MakeRig, tier: FaultyTier, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(tier)
    rig.put_below(tier, 2)
    rig.store(1)
    hung = tier.faults["contains"] = hanging()
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(rig.lookup(1, 2)))
    asking.start()
    assert hung.entered.wait(LONG_S)
    rig.clock.now += LONG_S
    for _ in range(3):
        hold = rig.hold(1, 2)
        assert len(hold.found) == 1
        hold.release()
    assert len(tier.calls_of("contains")) == 1
    assert rig.counters.totals() == {"faulty_timeouts": 1, "faulty_skipped": 3}
    assert caplog.messages == ["tier faulty: no answer to a look-up within 20 s: skipped until it answers"]
    tier.end_faults()
    asking.join()
    assert rig.manager.wait_idle(LONG_S)
    assert (answers, rig.lookup(1, 2)) == ([2], 2)


def test_a_lookup_does_not_wait_for_loads_that_take_long(rig: Rig, tier: FaultyTier) -> None:
    rig.put_below(tier, 1, 2)
    tier.faults["get"] = hanging()
    holds = [rig.hold(1) for _ in range(NUM_READERS)]
    futures = [rig.manager.layerwise_batched_get(hold, [0])[0] for hold in holds]
    assert rig.lookup(2) == 1
    assert not any(future.done() for future in futures)
    tier.end_faults()
    wait(futures, LONG_S)
    for hold in holds:
        hold.release()


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_a_layer_that_a_tier_fails_to_get_is_missing_and_no_other(
    rig: Rig, tier: FaultyTier, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig.put_below(tier, 2, 3)
    rig.store(1)
    tier.faults["get", 1] = BAD_ANSWERS[name]
    hold = rig.hold(1, 2, 3)
    for layer, wanted in enumerate(values(1, 2, 3)):
        [future] = rig.manager.layerwise_batched_get(hold, [layer])
        assert rig.values_of(future) == (wanted if layer != 1 else [wanted[0], None, None])
    assert rig.manager.wait_idle(LONG_S)
    assert rig.counters.totals() == {"faulty_errors": 1}
    assert len(caplog.messages) == 1
    assert rig.pool.references == NUM_LAYERS + 2 * (NUM_LAYERS - 1)
    hold.release()
    assert rig.host.contains(keys(1, 2, 3)) == [True, False, False]


@pytest.mark.parametrize("status", [Status.MISS, Status.ERROR, True, None, "ok"])
def test_only_pages_that_are_ok_arrive(
    rig: Rig, tier: FaultyTier, status: object, caplog: pytest.LogCaptureFixture
) -> None:
    rig.put_below(tier, 1, 2, 3)
    tier.faults["get"] = Fault(answer=lambda answers: [answers[0], status, answers[2]])
    hold = rig.hold(1, 2, 3)
    assert rig.load(hold) == values(1, None, 3)
    kind = "miss" if status is Status.MISS else "error"
    assert rig.counters.totals() == {f"faulty_get_{kind}": NUM_LAYERS}
    note = (
        ""
        if isinstance(status, Status)
        else f" ({status!r} for 1: a tier returns a lwkv.storage.Status for each)"
    )
    assert caplog.messages[0] == (
        f"tier faulty: get of 3 pages: {int(kind == 'miss')} missing, {int(kind == 'error')} failed{note}"
    )
    hold.release()
    assert rig.host.contains(keys(1, 2, 3)) == [True, False, True]


def test_a_put_that_returns_true_for_each_page_is_no_put_and_the_log_says_why(
    rig: Rig, tier: FaultyTier, caplog: pytest.LogCaptureFixture
) -> None:
    tier.faults["put"] = Fault(answer=lambda answers: [True] * len(answers))
    rig.store(1)
    assert not rig.manager.lower.flush(LONG_S)
    assert rig.counters.totals() == {"faulty_put_error": NUM_LAYERS - 1}
    assert caplog.messages == [
        f"tier faulty: put of {NUM_LAYERS - 1} pages: 0 without room, {NUM_LAYERS - 1} failed "
        f"(True for {NUM_LAYERS - 1}: a tier returns a lwkv.storage.Status for each)"
    ]


def test_layers_that_answer_out_of_order_arrive_in_their_own_futures(rig: Rig, tier: FaultyTier) -> None:
    rig.put_below(tier, 1)
    slow = tier.faults["get", 0] = hanging()
    hold = rig.hold(1)
    [first] = rig.manager.layerwise_batched_get(hold, [2])
    assert slow.entered.wait(LONG_S)
    second, third = rig.manager.layerwise_batched_get(hold, [0, 1])
    assert not wait([second, third], LONG_S).not_done
    assert not first.done()
    tier.end_faults()
    pages = [future.result(LONG_S).pages[0] for future in (second, third, first)]
    assert [int(rig.pool.page(int(page))[0]) for page in pages] == [value(1, layer) for layer in (0, 1, 2)]
    hold.release()
    assert rig.lookup(1) == 1


def test_pages_that_a_tier_still_writes_to_are_nobody_elses_until_its_call_ends(
    make_rig: MakeRig, tier: FaultyTier
) -> None:
    rig = make_rig(tier, num_chunks=2)
    rig.put_below(tier, 1)
    late = tier.faults["get", 2] = hanging()
    hold = rig.hold(1)
    assert not wait(rig.manager.layerwise_batched_get(hold, [0, 1]), LONG_S).not_done
    [last] = rig.manager.layerwise_batched_get(hold, [2])
    assert late.entered.wait(LONG_S)
    hold.release()
    hold.release()
    assert rig.pool.references == 1, "the page in the hands of the tier"
    free = rig.pool.allocate(2 * NUM_LAYERS - 1)
    assert free is not None
    assert rig.pool.allocate(1) is None
    tier.end_faults()
    assert rig.manager.wait_idle(LONG_S)
    assert last.done()
    assert rig.pool.references == len(free)
    assert len(rig.host) == 0, "what came too late is not kept"
    rig.pool.release(free)


def test_a_tier_that_hangs_is_left_alone_and_keeps_no_pages_but_those_in_its_hands(
    rig: Rig, tier: FaultyTier, caplog: pytest.LogCaptureFixture
) -> None:
    rig.put_below(tier, 1)
    tier.faults["get"] = hanging()
    holds = [rig.hold(1) for _ in range(2)]
    futures = [
        future for hold in holds for future in rig.manager.layerwise_batched_get(hold, range(NUM_LAYERS))
    ]
    assert rig.pool.references == 2 * NUM_LAYERS
    rig.clock.now += LONG_S
    assert rig.lookup(1) == 0
    assert sum(future.done() for future in futures) >= 2 * NUM_LAYERS - NUM_READERS
    done = [future.result().pages.tolist() for future in futures if future.done()]
    assert done == [[Missing.ERROR]] * len(done)
    assert rig.pool.references == 2 * NUM_LAYERS - len(done)
    assert len(caplog.messages) == 1
    assert rig.counters.totals()["faulty_timeouts"] == 1
    for hold in holds:
        hold.release()
    assert rig.pool.references == 2 * NUM_LAYERS - len(done)
    tier.end_faults()
    assert rig.manager.wait_idle(LONG_S)
    assert not wait(futures, LONG_S).not_done
    assert rig.pool.references == 0
    assert rig.lookup(1) == 1


def test_a_tier_that_cannot_keep_up_with_writes_does_not_fill_host_memory(
    make_rig: MakeRig, tier: FaultyTier
) -> None:
    rig = make_rig(tier, num_chunks=8)
    hung = tier.faults["put"] = hanging()
    for number in range(8):
        rig.commit(number)
    assert hung.entered.wait(LONG_S)
    assert rig.begin(8) is None, "all of them wait to be written"
    rig.clock.now += LONG_S
    rig.manager.lower.guards[0]._writes.is_answering()
    assert rig.pool.references <= (8 + NUM_WRITERS) * NUM_LAYERS
    rig.commit(8, 9, 10)
    assert rig.lookup(8, 9, 10) == 3
    assert rig.counters.totals()["faulty_timeouts"] == 1


def test_reads_do_not_wait_for_writes_nor_one_tier_for_another(make_rig: MakeRig) -> None:
    disk, remote = FaultyTier("disk"), FaultyTier("remote")
    rig = make_rig(disk, remote)
    rig.put_below(disk, 1)
    rig.put_below(remote, 2)
    disk.faults["put"] = hanging()
    remote.faults["put"] = hanging()
    rig.commit(3, 4, 5)
    disk.faults["get"] = hanging()
    hold = rig.hold(1, 2)
    futures = rig.manager.layerwise_batched_get(hold, range(NUM_LAYERS))
    disk_free = rig.hold(2)
    assert rig.load(disk_free) == values(2)
    assert not any(future.done() for future in futures)
    disk_free.release()
    hold.release()


def test_close_returns_though_a_tier_hangs_in_everything_and_futures_end(
    tier: FaultyTier, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(8, [tier])
    rig.put_below(tier, 1)
    for name in ("get", "put", "close"):
        tier.faults[name] = hanging()
    rig.commit(2)
    hold = rig.hold(1)
    first = rig.manager.layerwise_batched_get(hold, range(NUM_LAYERS))
    others = [rig.hold(1) for _ in range(3)]
    queued = [f for other in others for f in rig.manager.layerwise_batched_get(other, range(NUM_LAYERS))]
    rig.manager.close(0)
    assert caplog.messages == ["tier faulty did not end within the time given to close"]
    assert sum(future.done() for future in [*first, *queued]) >= 4 * NUM_LAYERS - NUM_READERS
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("lwkv-faulty")]
    assert mine
    assert all(thread.daemon for thread in mine)
    for held in (hold, *others):
        held.release()
    tier.end_faults()
    for thread in mine:
        thread.join(LONG_S)
    assert not wait([*first, *queued], LONG_S).not_done
    assert (rig.pool.pages_in_use, rig.pool.references, len(rig.host)) == (0, 0, 0)


def test_a_tier_that_fails_to_close_does_not_keep_the_others_open(caplog: pytest.LogCaptureFixture) -> None:
    disk, remote = FaultyTier("disk"), FaultyTier("remote")
    disk.faults["close"] = Fault(error=OSError("busy"))
    rig = Rig(8, [disk, remote])
    rig.store(1)
    rig.manager.close(LONG_S)
    assert remote.calls_of("close") == [[]]
    assert caplog.messages == ["tier disk: close failed: OSError: busy"]
    assert (rig.pool.references, len(rig.host)) == (0, 0)


def test_writes_under_way_end_before_their_tier_is_closed() -> None:
    tier = FaultyTier()
    rig = Rig(8, [tier])
    rig.commit(1, 2, 3)
    rig.manager.close(LONG_S)
    assert [name for name, _ in tier.calls] == ["put"] * (2 * 3) + ["close"]
    assert len(tier.pages) == 3 * NUM_LAYERS


def test_a_tier_is_never_closed_beside_another_call(tier: FaultyTier) -> None:
    rig = Rig(8, [tier])
    rig.put_below(tier, 1)
    hanging_get = tier.faults["get"] = hanging()
    hold = rig.hold(1)
    rig.manager.layerwise_batched_get(hold, [0])
    assert hanging_get.entered.wait(LONG_S)
    assert not rig.manager.close(0)
    assert tier.calls_of("close") == []
    hold.release()
    tier.end_faults()
    assert rig.manager.close(LONG_S)
    assert tier.calls_of("close") == [[]]


def test_after_close_loads_are_missing_stores_leave_nothing_and_nothing_hangs() -> None:
    tier = FaultyTier()
    rig = Rig(8, [tier])
    rig.put_below(tier, 1)
    hold, write = rig.hold(1), rig.begin(2)
    assert write is not None
    rig.manager.close(LONG_S)
    assert rig.load(hold) == values(None)
    hold.release()
    write.commit()
    assert rig.lookup(1, 2) == 0
    assert (rig.pool.references, rig.manager.writes_in_flight, len(rig.host)) == (0, 0, 0)


class OrderedTier(FaultyTier):
    """One that wants to know which chunks are one prompt; `log` has these calls and the puts, in order."""

    def __init__(self) -> None:
        super().__init__("ordered")
        self.log: list[tuple[str, list[ChunkKey]]] = []

    def follow(self, prompt: Sequence[ChunkKey], deadline_s: float) -> None:
        self.log.append(("follow", list(prompt)))

    def put(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        self.log.append(("put", [keys[0].chunk]))
        return super().put(keys, pages, deadline_s)


def test_a_tier_learns_of_a_prompt_before_it_gets_its_chunks_and_whenever_it_is_found(
    make_rig: MakeRig,
) -> None:
    tier = OrderedTier()
    rig = make_rig(tier)
    rig.store(1, 2)
    assert [prompt for call, prompt in tier.log if call == "follow"] == [keys(1, 2)]
    assert tier.log[0][0] == "follow"
    tier.log.clear()
    rig.store(1, 2, 3)
    assert tier.log == [("follow", keys(1, 2, 3)), *[("put", keys(3))] * 2]
    tier.log.clear()
    rig.hold(1, 2, 3, 4).release()
    rig.settle()
    assert tier.log == [("follow", keys(1, 2, 3))]
    rig.forget(3)
    tier.log.clear()
    assert rig.lookup(1, 2, 3, 4) == 3
    rig.settle()
    assert tier.log == [("follow", keys(1, 2, 3))]
    assert rig.lookup(1, 2) == 2
    rig.settle()
    assert len(tier.log) == 1, "a tier is left alone where host memory has all"


def test_a_chunk_that_is_being_put_is_not_put_a_second_time(make_rig: MakeRig, tier: FaultyTier) -> None:
    rig = make_rig(tier, keep_in_host=False)
    tier.faults["put", 0] = gate = hanging()
    rig.commit(1)
    assert gate.entered.wait(LONG_S)
    rig.commit(1)
    assert gate.gate is not None
    gate.gate.set()
    rig.settle()
    assert [call for call, _ in tier.calls] == ["put", "put"], "layer 0, and before it the others"
    assert rig.pool.references == 0
