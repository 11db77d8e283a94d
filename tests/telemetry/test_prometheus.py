from __future__ import annotations

from typing import ClassVar

from storage.faulty_tier import LONG_S, FaultyTier
from storage.rig import NUM_LAYERS, PAGE_BYTES, Rig

from lwkv.telemetry.prometheus import prometheus_text
from lwkv.telemetry.tier_meter import BOUNDS_US, Meter


def test_every_number_is_a_metric_and_those_of_tiers_carry_its_name() -> None:
    counts, gauges = (
        {"tokens_asked": 7, "disk_hits": 3, "remote_get_error": 1},
        {"chunks": 2, "disk_used_bytes": 10},
    )
    assert prometheus_text(counts, gauges, ["host", "disk", "remote"], model='a"b') == (
        "# TYPE lwkv_chunks gauge\n"
        'lwkv_chunks{model="a\\"b"} 2\n'
        "# TYPE lwkv_tier_get_error_total counter\n"
        'lwkv_tier_get_error_total{model="a\\"b",tier="remote"} 1\n'
        "# TYPE lwkv_tier_hits_total counter\n"
        'lwkv_tier_hits_total{model="a\\"b",tier="disk"} 3\n'
        "# TYPE lwkv_tier_used_bytes gauge\n"
        'lwkv_tier_used_bytes{model="a\\"b",tier="disk"} 10\n'
        "# TYPE lwkv_tokens_asked_total counter\n"
        'lwkv_tokens_asked_total{model="a\\"b"} 7\n'
    )


class Falling(FaultyTier):
    """A tier whose own numbers fall; one is called as a count is called."""

    numbers: ClassVar[dict[str, int]] = {"queue_total": 9, "hits": 7}

    def gauges(self) -> dict[str, int]:
        return self.numbers


def test_what_a_tier_tells_of_itself_may_fall_and_is_a_gauge_whatever_its_name() -> None:
    tier = Falling("own")
    rig = Rig(tiers=[tier])
    assert rig.manager.totals()["own_queue_total"] == 9
    tier.numbers = {"queue_total": 2, "hits": 1}
    assert rig.manager.wait_idle(LONG_S)
    counts, gauges = rig.manager.counts(), rig.manager.gauges()
    assert gauges["own_queue_total"] == 2
    assert not any("queue" in name for name in counts)
    lines = prometheus_text(counts, gauges, rig.manager.tier_names).splitlines()
    assert {"# TYPE lwkv_tier_queue_total gauge", 'lwkv_tier_queue_total{tier="own"} 2'} <= set(lines)
    rig.put_below(tier, 1)
    rig.hold(1).release()
    assert rig.manager.totals()["own_hits"] == 1, "a count stays one"
    rig.end()


def test_all_that_is_counted_only_grows_and_all_else_is_a_gauge() -> None:
    tier = FaultyTier("disk")
    rig = Rig(num_chunks=3, tiers=[tier])
    before = rig.manager.counts()
    for numbers in ((1, 2), (3, 4), (1, 5)):
        rig.store(*numbers)
        rig.hold(*numbers).release()
        after = rig.manager.counts()
        assert all(after[name] >= before[name] for name in before)
        before = after
    held = {"chunks", "pins", "writes_in_flight", "disk_resting", "host_used_bytes", "host_capacity_bytes"}
    assert rig.manager.gauges().keys() == held
    assert not before.keys() & held
    rig.end()


def test_times_are_a_histogram_whose_bars_add_up() -> None:
    meter = Meter()
    for seconds in (0.0001, 0.0002, 0.002, 99.0):
        meter.note_call("get", seconds, 5)
    stats = {f"disk_{name}": number for name, number in meter.totals().items()}
    lines = prometheus_text(stats, {}, ["disk"]).splitlines()
    assert lines[:2] == [
        "# TYPE lwkv_tier_get_bytes_total counter",
        'lwkv_tier_get_bytes_total{tier="disk"} 20',
    ]
    bars = [line for line in lines if "_bucket" in line]
    assert [int(bar.split()[1]) for bar in bars] == [2, 2, *[3] * (len(BOUNDS_US) - 2), 4]
    assert bars[0] == 'lwkv_tier_get_seconds_bucket{tier="disk",le="0.00025"} 2'
    assert bars[-1] == 'lwkv_tier_get_seconds_bucket{tier="disk",le="+Inf"} 4'
    assert 'lwkv_tier_get_seconds_sum{tier="disk"} 99.0023' in lines
    assert 'lwkv_tier_get_seconds_count{tier="disk"} 4' in lines
    assert not any("_us" in line for line in lines)


def test_a_tier_is_measured_by_what_it_was_asked_and_how_it_answered() -> None:
    tier = FaultyTier("disk")
    rig = Rig(tiers=[tier])
    rig.put_below(tier, 1, 2)
    hold = rig.hold(1, 2, 3)
    rig.load(hold)
    hold.release()
    rig.hold(1, 2).release()
    totals = rig.manager.totals()
    assert (totals["disk_hits"], totals["disk_misses"]) == (2, 1)
    assert (totals["host_hits"], totals["host_misses"]) == (2, 3)
    assert totals["disk_put_bytes"] == totals["disk_get_bytes"] == 2 * NUM_LAYERS * PAGE_BYTES
    assert (totals["disk_put_calls"], totals["disk_get_calls"]) == (2 * 2, NUM_LAYERS)
    assert totals["disk_resting"] == 0
    assert rig.manager.tier_names == ["host", "disk"]
    rig.end()
