"""The disk tier: the engine's loads and stores against plain threads, and prefills over a prefix on disk."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lwkv.benchmarks.bed import Bed, Slots
from lwkv.benchmarks.bench import Bench
from lwkv.benchmarks.findings import Findings, table
from lwkv.benchmarks.overlap import Overlap, measure_overlap, overlap_lines
from lwkv.benchmarks.plain_disk import PlainDisk
from lwkv.benchmarks.timing import Work, gb_per_s, median_ratio
from lwkv.storage.disk_io import reads_directly

GIB = 1 << 30


@dataclass(frozen=True)
class DiskMove:
    """The engine's GB/s from or to the device, that of plain threads, and the processor's time for each.

    `ratio` is the median of the ratios of neighbouring runs; `cpu` is in milliseconds a MiB.
    """

    name: str
    gb_s: float
    plain_gb_s: float
    ratio: float
    cpu: float
    plain_cpu: float


@dataclass(frozen=True)
class DiskFindings(Findings):
    """Moves of one prompt that no tier but the disk keeps, and prefills over it; bytes checked after all."""

    tokens: int
    num_bytes: int
    direct: bool
    moves: list[DiskMove]
    overlaps: list[Overlap]
    exact: bool

    def lines(self, absolute: bool) -> Iterator[str]:
        way = "O_DIRECT" if self.direct else "buffered: O_DIRECT is refused"
        yield f"{self.tokens} tokens, {self.num_bytes / 1e9:.3g} GB, from disk to device and back; {way}"
        head = ["", "GB/s", "plain threads", "ratio", "cpu, ms a MiB", "of plain threads"]
        rows = [
            [
                move.name,
                *(f"{speed:.2f}" for speed in (move.gb_s, move.plain_gb_s, move.ratio)),
                *(f"{cpu:.3f}" for cpu in (move.cpu, move.plain_cpu)),
            ]
            for move in self.moves
        ]
        yield from table(head, rows)
        yield from overlap_lines(self.overlaps, absolute)

    def faults(self) -> Iterator[str]:
        if not self.exact:
            yield "disk: the bytes that were loaded differ from those that were stored"


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


def measure_disk(bench: Bench) -> DiskFindings:
    """Measure in a new folder where the run's `disk` says; it is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="lwkv-bench-", dir=bench.disk) as folder:
        return _measure(bench, Path(folder))


def _measure(bench: Bench, folder: Path) -> DiskFindings:
    num_bytes, direct = bench.shape.kv_bytes(bench.prefix), reads_directly(str(folder))
    # A round stores a prompt; none of them is removed within a time.
    limit = (len(bench.suffixes) + bench.repeats + 4) * (2 * num_bytes + GIB // 16) / GIB
    config = {"local_cpu": False, "local_disk": str(folder), "max_local_disk_size": limit}
    with bench.bed(prompts=2, config=config) as bed:
        bed.fill()
        kept = bed.new_prompt()
        bed.keep(kept)
        moves = _measure_moves(bench, bed, folder, kept, direct)
        overlaps = [measure_overlap(bench, bed, kept, suffix) for suffix in bench.suffixes]
        bed.clear_target()
        bed.load(kept)
        exact = bed.places_agree()
    return DiskFindings(bench.prefix, num_bytes, direct, moves, overlaps, exact)


def _measure_moves(bench: Bench, bed: Bed, folder: Path, kept: Slots, direct: bool) -> list[DiskMove]:
    shape, num_bytes = bed.shape, bed.shape.kv_bytes(bed.num_tokens)
    piece = -(-shape.chunk_size * shape.token_bytes // 4096) * 4096
    plain = PlainDisk(folder, bed.num_tokens // shape.chunk_size, shape.num_layers * piece, piece, direct)

    def store() -> None:
        bed.engine.store(bed.new_prompt(), slot_mapping=bed.source)
        bed.flush()

    def before() -> None:
        bed.flush()
        plain.remove_old()

    works = [_Timed(plain.write), _Timed(store), _Timed(plain.read), _Timed(lambda: bed.load(kept))]
    times = bench.alternate_ms(works, before)
    speeds = [gb_per_s(num_bytes, statistics.median(taken)) for taken in times]
    cpu = [work.cpu_ms_per(num_bytes) for work in works]
    return [
        DiskMove(name, speeds[i + 1], speeds[i], median_ratio(times[i], times[i + 1]), cpu[i + 1], cpu[i])
        for name, i in (("store", 0), ("load", 2))
    ]
