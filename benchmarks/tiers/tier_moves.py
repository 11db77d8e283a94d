"""The engine's loads from a lower tier and its stores, against what does nothing but move the same bytes."""

from __future__ import annotations

import statistics
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from lwkv.benchmarks.bench.findings import Findings, table
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.measured_engine import MeasuredEngine, Slots
from lwkv.benchmarks.measuring.timing import Work, gb_per_s, median_ratio
from lwkv.benchmarks.prefills.overlap import Overlap, measure_overlap, overlap_lines


class Plain(Protocol):
    """Moves as many bytes as a prompt has, in the same pieces, by the plainest means."""

    def write(self) -> None:
        """Write all of it, under names of its own each time."""

    def read(self) -> None:
        """Read all that was written last."""

    def remove_old(self) -> None:
        """Remove all but what was written last."""


@dataclass(frozen=True)
class TierMove:
    """The engine's GB/s from or to the device, that of plain means, and the processor's time for each.

    `ratio` is the median of the ratios of neighbouring runs; `cpu` is in milliseconds a MiB.
    """

    name: str
    gb_s: float
    plain_gb_s: float
    ratio: float
    cpu: float
    plain_cpu: float


class _Timed:
    """A work that notes the processor's time of all threads, run by run."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.cpu_s: list[float] = []

    def __call__(self) -> None:
        start = time.process_time()
        self._work()
        self.cpu_s.append(time.process_time() - start)

    def cpu_ms_per(self, num_bytes: int) -> float:
        return statistics.median(self.cpu_s[1:]) * 1e3 / (num_bytes / 2**20)


@dataclass(frozen=True)
class TierFindings(Findings):
    """Moves by the tier alone, then by the engine, of a prompt that no other tier keeps; prefills over it."""

    tokens: int
    num_bytes: int
    moves: list[TierMove]
    overlaps: list[Overlap]
    exact: bool
    tier: ClassVar[str]
    plain: ClassVar[str]
    """What tells its name, and that of the plain means."""

    @property
    @abstractmethod
    def way(self) -> str:
        """From where to the device and back, and how."""

    def lines(self, absolute: bool) -> Iterator[str]:
        yield f"{self.tokens} tokens, {self.num_bytes / 1e9:.3g} GB, {self.way}"
        yield from move_lines(self.moves, self.plain)
        yield from overlap_lines(self.overlaps, absolute)

    def faults(self) -> Iterator[str]:
        if not self.exact:
            yield f"{self.tier}: the bytes that were loaded differ from those that were stored"


class Found(NamedTuple):
    """What an engine over a tier does; the fields are those of TierFindings."""

    moves: list[TierMove]
    overlaps: list[Overlap]
    exact: bool


def measure_engine(bench: Bench, measured: MeasuredEngine, plain: Plain) -> Found:
    """Stores and loads of the run's prefix, `plain` in turn; prefills over it; whether bytes are right."""
    measured.fill()
    kept = measured.new_prompt()
    measured.keep(kept)
    moves = measure_moves(bench, measured, kept, plain)
    overlaps = [measure_overlap(bench, measured, kept, suffix) for suffix in bench.suffixes]
    measured.clear_target()
    measured.load(kept)
    return Found(moves, overlaps, measured.places_agree())


def measure_moves(bench: Bench, measured: MeasuredEngine, kept: Slots, plain: Plain) -> list[TierMove]:
    """Store new prompts and load `kept`, with `plain` in turn, run by run."""

    def store() -> None:
        measured.engine.store(measured.new_prompt(), slot_mapping=measured.source)
        measured.flush()

    def before() -> None:
        measured.flush()
        plain.remove_old()

    return compare_moves(bench, {"store": store, "load": lambda: measured.load(kept)}, plain, before)


def compare_moves(
    bench: Bench, moves: Mapping[str, Work], plain: Plain, before: Work | None = None
) -> list[TierMove]:
    """Run a work that writes and one that reads as many bytes as the run's prefix has, in that order, and
    `plain` before each; `before` runs before everything, outside the time."""
    num_bytes = bench.shape.kv_bytes(bench.prefix)
    write, read = moves.values()
    works = [_Timed(plain.write), _Timed(write), _Timed(plain.read), _Timed(read)]
    times = bench.alternate_ms(works, before)
    speeds = [gb_per_s(num_bytes, statistics.median(taken)) for taken in times]
    cpu = [work.cpu_ms_per(num_bytes) for work in works]
    return [
        TierMove(name, speeds[i + 1], speeds[i], median_ratio(times[i], times[i + 1]), cpu[i + 1], cpu[i])
        for name, i in zip(moves, (0, 2), strict=True)
    ]


def move_lines(moves: Sequence[TierMove], plain: str) -> Iterator[str]:
    """Tell them to a reader; `plain` names the plain means."""
    head = ["", "GB/s", plain, "ratio", "cpu, ms a MiB", f"of {plain}"]
    rows = [
        [
            move.name,
            *(f"{speed:.2f}" for speed in (move.gb_s, move.plain_gb_s, move.ratio)),
            *(f"{cpu:.3f}" for cpu in (move.cpu, move.plain_cpu)),
        ]
        for move in moves
    ]
    yield from table(head, rows)
