from __future__ import annotations

import pytest

from lwkv.benchmarks.trace import losses as causes
from lwkv.benchmarks.trace.losses import losses
from lwkv.benchmarks.trace.recorder import Trace, Work

MB = 10**6


def copy(way: str, asked: float, start: float, end: float, num_bytes: int = MB) -> Work:
    return Work("copy", way, num_bytes, 1, asked, asked + 0.5, start, end)


def kernel(way: str, asked: float, start: float, end: float) -> Work:
    return Work("move", way, 0, 0, asked, asked + 0.5, start, end)


def found(trace: Trace, way: str) -> dict[str, float]:
    """At 1 GB/s: a megabyte a millisecond."""
    return {loss.cause: round(loss.ms, 6) for loss in losses(trace, way, 1.0) if abs(loss.ms) > 1e-9}


def test_the_beginning_and_the_end_of_a_save_have_their_causes() -> None:
    works = [kernel("save", 2, 3, 5), copy("save", 3, 6, 8)]
    assert found(Trace(works, [], 4, 8, 12), "save") == {
        causes.HOST_FIRST: 2.5,
        causes.KERNEL_FIRST: 2.5,
        causes.START_FIRST: 1,
        causes.SLOW: 1,
        causes.END: 4,
    }


def test_a_gap_is_the_hosts_until_the_copy_is_queued_then_the_kernels_until_it_could_start() -> None:
    works = [
        *(kernel("save", 0, 0.5, 1), copy("save", 1, 1.5, 2.5)),
        *(kernel("save", 3, 4, 6), copy("save", 4.5, 7, 8)),
    ]
    assert found(Trace(works, [], 5, 8, 8), "save") == {
        causes.HOST_FIRST: 0.5,
        causes.KERNEL_FIRST: 0.5,
        causes.HOST_LATE: 3,
        causes.KERNEL_LATE: 1,
        causes.BETWEEN: 1,
    }


def test_a_load_begins_with_its_copy_and_ends_with_its_kernels() -> None:
    works = [copy("load", 1, 2, 3), kernel("load", 2, 3, 4), copy("load", 2, 4, 5), kernel("load", 3, 5, 7)]
    assert found(Trace(works, [], 4, 7, 9), "load") == {
        causes.HOST_FIRST: 1.5,
        causes.START_FIRST: 0.5,
        causes.KERNEL_LATE: 1,
        causes.KERNEL_LAST: 2,
    }


@pytest.mark.parametrize("way", ["load", "save"])
def test_the_other_ways_work_is_left_out(way: str) -> None:
    other = "save" if way == "load" else "load"
    own = [kernel(way, 0, 0.5, 1), copy(way, 1, 1.5, 2.5), copy(way, 1.2, 2.5, 3.5)]
    beside = [kernel(other, 0.9, 1, 9), copy(other, 1.1, 2, 8)]
    assert found(Trace(own, [], 2, 4, 4), way) == found(Trace(own + beside, [], 2, 4, 4), way)
