"""The parts of the bench, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lwkv.benchmarks.bench.findings import Findings
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.blending.part import measure_blend
from lwkv.benchmarks.peers.part import measure_peers
from lwkv.benchmarks.prefills.interference import measure_interference
from lwkv.benchmarks.prefills.overlap import measure_overlaps
from lwkv.benchmarks.prefills.recorded import record_prefill
from lwkv.benchmarks.prefills.store_cost import measure_store_cost
from lwkv.benchmarks.throttled.part import measure_throttled
from lwkv.benchmarks.tiers.disk import measure_disk
from lwkv.benchmarks.tiers.remote import measure_remote
from lwkv.benchmarks.transfers.codec import measure_codec
from lwkv.benchmarks.transfers.host import measure_host
from lwkv.benchmarks.transfers.kernels import measure_kernels
from lwkv.benchmarks.transfers.kinds import measure_kinds
from lwkv.benchmarks.transfers.moves import measure_moves
from lwkv.benchmarks.transfers.profile import measure_profile
from lwkv.benchmarks.transfers.sweep import measure_sweep
from lwkv.errors import ConfigError
from lwkv.platforms import Platform


@dataclass(frozen=True)
class Part:
    """One part; without `on_host` its figures mean nothing where the host is the device."""

    title: str
    measure: Callable[[Bench], Findings]
    on_host: bool = True


PEERS = "peers"
PARTS = {
    "ceilings": Part("Plain page-locked copies", lambda bench: bench.ceilings),
    "moves": Part("Loads and saves, end to end", measure_moves),
    "overlap": Part("Prefill over a cached prefix", measure_overlaps),
    "store": Part("What storing adds to a prefill", measure_store_cost),
    "interference": Part("The model's kernels beside a transfer", measure_interference, on_host=False),
    "host": Part("Host time", measure_host),
    "profile": Part("What is not the link", measure_profile),
    "codec": Part("Raw, lossless and fp8 pages", measure_codec),
    "kernels": Part("Kernels alone", measure_kernels),
    "kinds": Part("Several kinds of caches", measure_kinds),
    "sweep": Part("Chunk sizes, layouts, batches", measure_sweep),
    "pipeline": Part("The pipeline alone", measure_throttled),
    "blend": Part("Blending", measure_blend),
    "disk": Part("The disk tier", measure_disk),
    "remote": Part("The remote tier", measure_remote),
    "timeline": Part("One overlapped prefill", record_prefill),
    PEERS: Part("LMCache in the same process", measure_peers, on_host=False),
}


def choose_parts(platform: Platform, only: Sequence[str], peers: bool) -> list[str]:
    """Choose parts: those of `only`, or all that mean something on `platform`; peers where asked for.

    Raises ConfigError for a name that no part has.
    """
    unknown = [name for name in only if name not in PARTS]
    if unknown:
        raise ConfigError(f"no part {', '.join(map(repr, unknown))}; there are {', '.join(PARTS)}")
    on_host = platform.device_type == "cpu"
    usual = [name for name, part in PARTS.items() if name != PEERS and (part.on_host or not on_host)]
    chosen = [*(only or usual), *([PEERS] if peers else [])]
    return [name for name in PARTS if name in chosen]
