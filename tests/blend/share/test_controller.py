"""The share that hides behind the loading, and where loading does not pay."""

from __future__ import annotations

import pytest
import torch
from blend.conftest import Bench, prompt

from lwkv.blend.share.controller import BatchWork, LoadingController, Reason
from lwkv.blend.share.pace import Pace, PaceFound
from lwkv.platforms import Platform

WORK = BatchWork(reused=1000, loaded=1000, always=50, num_layers=32, full_layers=1)


def measured(compute: float, load: float, minimum: float = 0.15) -> LoadingController:
    controller = LoadingController(minimum)
    controller.compute_s, controller.load_s = compute, load
    return controller


def test_before_anything_was_timed_the_share_is_the_minimum() -> None:
    decision = LoadingController(0.15).decide(WORK)
    assert (decision.share, decision.reason) == (0.15, Reason.UNMEASURED)


def test_a_fast_tier_hides_no_more_than_the_minimum() -> None:
    decision = measured(1.0, 0.05).decide(WORK)
    assert (decision.share, decision.reason) == (0.15, Reason.MINIMUM)


@pytest.mark.parametrize("load", [0.3, 0.5, 0.8])
def test_computing_takes_as_long_as_a_slow_tier(load: float) -> None:
    decision = measured(2.0, 2.0 * load).decide(WORK)
    assert decision.reason is Reason.HIDDEN
    assert 2.0 * WORK.rows(decision.share) == pytest.approx(2.0 * load * WORK.loads)


@pytest.mark.parametrize("load", [1.1, 5.0])
def test_a_tier_that_is_slower_than_computing_is_left_out(load: float) -> None:
    decision = measured(1.0, load).decide(WORK)
    assert (decision.share, decision.reason) == (1.0, Reason.PREFILL)


def test_a_tier_that_was_left_out_is_tried_again_after_a_while() -> None:
    controller = measured(1.0, 1.5)
    reasons = [controller.decide(WORK).reason for _ in range(10)]
    assert reasons[0] is Reason.PREFILL
    assert reasons[-1] is Reason.HIDDEN


@pytest.mark.parametrize("known", [[], [10.0] * 5], ids=["at first", "after fast ones"])
def test_one_load_however_slow_leaves_no_more_than_two_prompts_without_their_segments(
    known: list[float],
) -> None:
    controller = LoadingController(0.15)
    for seconds in known:
        controller.learn(WORK, 10_000, PaceFound(seconds, 0.0, 0.0))
    controller.learn(WORK, 10_000, PaceFound(10.0, 1e6, 0.0))
    reasons = [controller.decide(WORK).reason for _ in range(3)]
    assert reasons == [Reason.PREFILL, Reason.PREFILL, Reason.HIDDEN]


def test_a_tier_that_stays_slow_is_tried_less_and_less_often_and_one_that_recovers_as_before() -> None:
    controller = LoadingController(0.15)

    def prefills_after(waited: float) -> int:
        controller.learn(WORK, 10_000, PaceFound(10.0, waited, 0.0))
        return next(n for n in range(100) if controller.decide(WORK).reason is not Reason.PREFILL)

    slow = [prefills_after(1e6) for _ in range(20)]
    assert slow == sorted(slow)
    assert (slow[0], slow[1], slow[-1]) == (2, 4, 14)
    assert prefills_after(0.0) == 0
    assert prefills_after(1e6) == 2


def test_a_pass_too_short_for_the_clock_teaches_nothing() -> None:
    controller = LoadingController(0.15)
    controller.learn(WORK, 8000, PaceFound(0.0, 0.0, 0.0))
    assert (controller.compute_s, controller.load_s) == (None, None)
    assert controller.decide(WORK).reason is Reason.UNMEASURED


def test_a_pass_that_the_device_could_not_time_has_no_pace(
    platform: Platform, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "elapsed_ms", lambda start, end: None)
    pace = Pace(platform, device)
    pace._timed = True
    pace.arrive()
    pace.go_on()
    pace.end()
    platform.synchronize_device(device)
    assert pace.found() is None


def test_a_pass_that_was_held_up_tells_the_pace_of_its_loads() -> None:
    controller = LoadingController(0.15)
    controller.learn(WORK, row_layers=8000, pace=PaceFound(computed=8.0, waited=8.0, waited_first=0.2))
    assert controller.compute_s == pytest.approx(1e-3)
    assert controller.load_s == pytest.approx(16.0 / WORK.loads)


def test_a_share_that_was_raised_comes_down_when_the_tier_becomes_faster() -> None:
    controller = measured(1e-3, 5e-4)
    shares = []
    for _ in range(25):
        share = controller.decide(WORK).share
        shares.append(share)
        rows = int(WORK.rows(share))
        controller.learn(WORK, rows, PaceFound(rows * 1e-3, 0.0, 0.0))
    assert shares[0] > 0.4
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == 0.15


def test_what_the_first_layer_is_waited_for_does_not_count_as_held_up() -> None:
    controller = LoadingController(0.15)
    controller.learn(WORK, 8000, PaceFound(computed=8.0, waited=4.0, waited_first=4.0))
    assert controller.load_s is not None
    assert controller.load_s < 12.0 / WORK.loads


def test_a_pass_without_loads_tells_the_speed_of_computing_alone() -> None:
    controller = LoadingController(0.15)
    controller.learn(BatchWork(0, 0, 100, 32, 1), 3200, PaceFound(6.4, 0.0, 0.0))
    assert (controller.compute_s, controller.load_s) == (pytest.approx(2e-3), None)


def test_a_pace_parts_computing_from_waiting(platform: Platform, device: torch.device) -> None:
    pace = Pace(platform, device)
    assert pace.found() is None
    for _ in range(3):
        pace.arrive()
        pace.go_on()
    pace.end()
    platform.synchronize_device(device)
    found = pace.found()
    assert found is not None
    assert found.waited >= found.waited_first >= 0
    assert found.computed > 0


def test_decisions_and_tokens_are_counted(bench: Bench) -> None:
    blender = bench.blender()
    bench.encode(blender)
    _, request = prompt([2, 0, 1])
    (first,) = blender.prefill([request])
    assert first.share == 0.15
    blender.prefill([request])
    totals = bench.engine.stats()
    decided = {name: count for name, count in totals.items() if name.startswith("blend_decisions_")}
    assert decided["blend_decisions_unmeasured"] == 1
    assert sum(decided.values()) == 2
    assert totals["blend_requests"] == 2
    assert totals["blend_tokens_reused"] >= 42
    stats = blender.stats()
    assert stats["compute_s"] > 0
    assert stats["load_s"] > 0


def test_where_loading_does_not_pay_a_prompt_is_computed_in_full(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    blender = bench.blender()
    bench.encode(blender)
    controller = blender._shares.controller
    assert controller is not None
    controller.compute_s, controller.load_s = 1e-9, 1.0
    monkeypatch.setattr(
        bench.engine.connector.in_place, "begin_load", lambda *_: pytest.fail("a load begins")
    )
    tokens, request = prompt([2, 0, 1])
    (found,) = blender.prefill([request])
    assert (found.num_reused, found.num_computed) == (0, len(tokens))
    torch.testing.assert_close(found.logits.cpu(), bench.full(tokens), rtol=1e-4, atol=1e-4)
    assert bench.engine.stats()["blend_decisions_prefill"] == 1
