"""What lwkv is to reach in SGLang, and whether it did in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from lwkv.benchmarks.measuring.timing import percentile
from lwkv.benchmarks.sglang.findings import Case

LOAD_CALLS = (
    "lookup",
    "load",
    "start_layer_wise_loading",
    "wait_until",
    "finish_layer_wise_loading",
)
STORE_CALLS = ("offload", "num_completed_offloads", "pop_completed_offload")
MOST_OVER_DEVICE_MS = 3.0
MOST_THREAD_MS = 1.0

Sums = Callable[[Mapping[str, float]], float]


@dataclass(frozen=True, slots=True)
class Gate:
    """A figure in milliseconds, and the most that it may be; None where a run does not have it."""

    name: str
    got: float | None
    most: float | None

    @property
    def holds(self) -> bool | None:
        """None where it was not measured."""
        return None if self.got is None or self.most is None else self.got <= self.most

    def __str__(self) -> str:
        if self.got is None or self.most is None:
            return f"gate, {self.name}: not measured"
        verdict = "holds" if self.holds else "FAILS"
        return f"gate, {self.name}: {self.got:.2f} ms, at most {self.most:.2f}: {verdict}"


def load_ms(batch: Mapping[str, float]) -> float:
    """What the load of a batch took of the scheduler's thread."""
    return sum(batch.get(call, 0.0) for call in LOAD_CALLS)


def store_ms(batch: Mapping[str, float]) -> float:
    """What the stores since the batch before took of it."""
    return sum(batch.get(call, 0.0) for call in STORE_CALLS)


def find_gates(cases: Sequence[Case]) -> list[Gate]:
    """All gates of every case of lwkv, most of them against HiCache in the same run."""
    hicache = next((case for case in cases if case.mode == "hicache"), None)
    return [gate for case in cases if case.mode.startswith("lwkv") for gate in _gates(case, hicache)]


def thread_table(cases: Sequence[Case]) -> str:
    """What a batch took of the scheduler's thread for loads and for stores: medians in milliseconds."""
    lines = ["| mode | scheduler's thread, loads | stores | both |", "|---|---|---|---|"]
    for case in cases:
        for where, batches in (("", case.host_ms), (", beside requests", case.host_ms_beside)):
            times = [_median(batches, sums) for sums in (load_ms, store_ms, _both_ms)]
            cells = [f"{time:.2f}" for time in times if time is not None]
            lines += [f"| {case.mode}{where} | {' | '.join(cells)} |"] * bool(cells)
    return "\n".join(lines) if len(lines) > 2 else ""


def _gates(case: Case, hicache: Case | None) -> Iterator[Gate]:
    host, device = _time(case, "host"), _time(case, "device")
    over = None if host is None or device is None else host - device
    yield Gate(f"{case.mode}, host hit over device hit", over, MOST_OVER_DEVICE_MS)
    yield Gate(f"{case.mode}, host hit against HiCache's", host, _time(hicache, "host"))
    for what, sums in (("loads", load_ms), ("loads and stores", _both_ms)):
        yield Gate(
            f"{case.mode}, scheduler's thread for a batch's {what}",
            _median(case.host_ms, sums),
            MOST_THREAD_MS,
        )
    yield Gate(
        f"{case.mode}, p99 between tokens beside requests against HiCache's", _gap(case), _gap(hicache)
    )


def _both_ms(batch: Mapping[str, float]) -> float:
    return load_ms(batch) + store_ms(batch)


def _median(batches: Sequence[Mapping[str, float]], sums: Sums) -> float | None:
    return median(map(sums, batches)) if batches else None


def _time(case: Case | None, kind: str) -> float | None:
    return median(case.ms[kind]) if case is not None and kind in case.ms else None


def _gap(case: Case | None) -> float | None:
    if case is None or case.served is None or not case.served.gaps_ms:
        return None
    return percentile(case.served.gaps_ms, 0.99)
