from __future__ import annotations

import torch

from lwkv.benchmarks.bench.findings import table
from lwkv.benchmarks.measuring.timing import alternate_ms, gb_per_s, median_ms, median_ratio
from lwkv.platforms import Platform


def test_works_take_turns_and_the_first_round_is_not_counted(
    platform: Platform, device: torch.device
) -> None:
    calls: list[str] = []
    works = [lambda: calls.append("a"), lambda: calls.append("b")]
    times = alternate_ms(platform, device, works, repeats=2, before=lambda: calls.append("-"))
    assert calls == ["-", "a", "-", "b"] * 3
    assert [len(taken) for taken in times] == [2, 2]


def test_a_median_is_of_as_many_runs_as_asked_for(platform: Platform, device: torch.device) -> None:
    calls: list[int] = []
    assert median_ms(platform, device, lambda: calls.append(1), repeats=3) >= 0
    assert len(calls) == 4


def test_ratios_are_paired_before_the_median_is_taken() -> None:
    assert median_ratio([10.0, 300.0, 42.0], [10.0, 200.0, 40.0]) == 1.05


def test_speed_is_in_units_of_a_thousand_million_bytes() -> None:
    assert gb_per_s(2_000_000_000, 500.0) == 4.0


def test_a_table_aligns_its_columns() -> None:
    assert list(table(["", "GB/s"], [["load", "54.6"], ["x", "1.0"]])) == [
        "      GB/s",
        "load  54.6",
        "x      1.0",
    ]
