"""The disk tier: the engine's loads and stores against plain threads, and prefills over a prefix on disk."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.tiers.disk_alone import DiskAlone
from lwkv.benchmarks.tiers.plain_disk import PlainDisk
from lwkv.benchmarks.tiers.tier_moves import TierFindings, TierMove, compare_moves, measure_engine
from lwkv.storage.disk.io import reads_directly

GIB = 1 << 30


@dataclass(frozen=True)
class DiskFindings(TierFindings):
    """`direct` is whether the folder takes O_DIRECT."""

    direct: bool
    tier = "disk"
    plain = "plain threads"

    @property
    def way(self) -> str:
        return (
            f"from disk to device and back; {'O_DIRECT' if self.direct else 'buffered: O_DIRECT is refused'}"
        )


def measure_disk(bench: Bench) -> DiskFindings:
    """Measure in a new folder where the run's `disk` says; it is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="lwkv-bench-", dir=bench.disk) as folder:
        return _measure(bench, Path(folder))


def _measure(bench: Bench, folder: Path) -> DiskFindings:
    num_bytes, direct = bench.shape.kv_bytes(bench.prefix), reads_directly(str(folder))
    # A round stores a prompt; none of them is removed within a time.
    limit = (len(bench.suffixes) + bench.repeats + 4) * (2 * num_bytes + GIB // 16) / GIB
    config = {"local_cpu": False, "local_disk": str(folder), "max_local_disk_size": limit}
    plain = _plain(bench, folder, direct)
    moves = _measure_tier(bench, folder, plain)
    with bench.new_engine(prompts=2, config=config) as measured:
        found = measure_engine(bench, measured, plain)
    return DiskFindings(bench.prefix, num_bytes, moves + found.moves, found.overlaps, found.exact, direct)


def _measure_tier(bench: Bench, folder: Path, plain: PlainDisk) -> list[TierMove]:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        alone = DiskAlone(bench, Path(own))
        moves = {"tier, put": alone.write, "tier, get": alone.read}
        compared = compare_moves(bench, moves, plain, plain.remove_old)
        alone.close()
    return compared


def _plain(bench: Bench, folder: Path, direct: bool) -> PlainDisk:
    shape = bench.shape
    piece = -(-shape.chunk_size * shape.token_bytes // 4096) * 4096
    return PlainDisk(folder, bench.prefix // shape.chunk_size, shape.num_layers * piece, piece, direct)
