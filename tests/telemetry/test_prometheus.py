from __future__ import annotations

from storage.faulty_tier import FaultyTier
from storage.rig import NUM_LAYERS, PAGE_BYTES, Rig

from lwkv.telemetry.prometheus import is_gauge, prometheus_text
from lwkv.telemetry.tier_meter import BOUNDS_US, Meter


def test_every_number_is_a_metric_and_those_of_tiers_carry_its_name() -> None:
    stats = {"chunks": 2, "tokens_asked": 7, "disk_hits": 3, "disk_used_bytes": 10, "remote_get_error": 1}
    assert prometheus_text(stats, ["host", "disk", "remote"], model='a"b') == (
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


def test_what_there_is_now_is_told_from_what_only_grows() -> None:
    held, grows = ("chunks", "pages_in_use", "disk_files", "host_resting"), ("chunks_evicted", "disk_hits")
    assert all(is_gauge(name, ["host", "disk"]) for name in held)
    # Of a tier that there is not, it is no gauge's name.
    assert not any(is_gauge(name, ["host", "disk"]) for name in (*grows, "remote_files", "files_lost"))


def test_times_are_a_histogram_whose_bars_add_up() -> None:
    meter = Meter()
    for seconds in (0.0001, 0.0002, 0.002, 99.0):
        meter.note_call("get", seconds, 5)
    stats = {f"disk_{name}": number for name, number in meter.totals().items()}
    lines = prometheus_text(stats, ["disk"]).splitlines()
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
