"""The gates of lwkv in SGLang are told from a run's own figures."""

from __future__ import annotations

from lwkv.benchmarks.sglang.findings import Case
from lwkv.benchmarks.sglang.gates import find_gates, thread_table
from lwkv.benchmarks.sglang.load import Served


def hicache() -> Case:
    return Case("hicache", {"host": [9.0, 37.0, 38.0]}, served=Served(gaps_ms=[5.0, 20.0]))


def lwkv(host: float, thread: float, gap: float) -> Case:
    batches = [{"lookup": 0.25, "wait_until": thread - 0.25, "offload": 0.5}] * 3
    ms = {"device": [32.0, 32.0, 99.0], "host": [host, host, 99.0]}
    return Case("lwkv", ms, host_ms=batches, served=Served(gaps_ms=[5.0, gap]))


def verdicts(*cases: Case) -> list[bool | None]:
    return [gate.holds for gate in find_gates(cases)]


def test_every_gate_holds_up_to_its_limit() -> None:
    assert verdicts(hicache(), lwkv(35.0, 0.5, 20.0)) == [True] * 5


def test_every_gate_fails_beyond_its_limit() -> None:
    assert verdicts(hicache(), lwkv(37.5, 1.25, 20.5)) == [False] * 5
    # HiCache's own figures decide, whatever their order.
    assert verdicts(lwkv(36.0, 1.0, 20.0), hicache()) == [False, True, True, False, True]


def test_what_was_not_measured_neither_holds_nor_fails() -> None:
    assert verdicts(lwkv(35.0, 0.5, 20.0)) == [True, None, True, True, None]
    assert verdicts(hicache()) == []
    first, second, *_ = map(str, find_gates([lwkv(35.0, 0.5, 20.0)]))
    assert first == "gate, lwkv, host hit over device hit: 3.00 ms, at most 3.00: holds"
    assert second == "gate, lwkv, host hit against HiCache's: not measured"


def test_loads_and_stores_are_told_apart() -> None:
    case = lwkv(35.0, 0.75, 20.0)
    case.host_ms_beside = [{"pop_completed_offload": 0.125, "load": 0.25}]
    assert thread_table([hicache(), case]).splitlines()[2:] == [
        "| lwkv | 0.75 | 0.50 | 1.25 |",
        "| lwkv, beside requests | 0.25 | 0.12 | 0.38 |",
    ]
    assert thread_table([hicache()]) == ""
