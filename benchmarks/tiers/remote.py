"""The remote tier: the engine's loads and stores against its client alone."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import torch

from lwkv.benchmarks.bench.findings import Absent, Findings
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.tiers.plain_remote import open_plain, tier_alone
from lwkv.benchmarks.tiers.tier_moves import Plain, TierFindings, TierMove, compare_moves, measure_engine
from lwkv.config.secrets import cut
from lwkv.config.settings import Config
from lwkv.storage import TierSetup
from lwkv.storage.registry import open_tiers
from lwkv.telemetry.counters import Counters


@dataclass(frozen=True)
class RemoteFindings(TierFindings):
    """`server` is its URL without secrets."""

    server: str
    tier = "remote"
    plain = "client alone"

    @property
    def way(self) -> str:
        return f"from {self.server} to device and back"


def measure_remote(bench: Bench) -> Findings:
    """Measure the server that the run names; its memory must hold six prompts, and may evict others."""
    if bench.remote is None:
        return Absent("no server to measure: give one with --remote, such as valkey://127.0.0.1:6379")
    return _measure(bench, bench.remote)


def _measure(bench: Bench, url: str) -> RemoteFindings:
    shape, num_chunks = bench.shape, bench.prefix // bench.shape.chunk_size
    page_bytes = shape.chunk_size * shape.token_bytes
    slab = torch.randint(0, 256, (shape.num_layers * num_chunks, page_bytes), dtype=torch.uint8)
    config = {"local_cpu": False, "remote_url": url, "load_timeout_s": 60.0}
    plain = open_plain(url, slab, num_chunks)
    moves = _measure_tier(bench, TierSetup(Config(**config), 1, page_bytes, "bench", Counters()), slab, plain)
    with bench.new_engine(prompts=2, config=config, first_prompt=secrets.randbits(32)) as measured:
        found = measure_engine(bench, measured, plain)
    plain.close()
    num_bytes, server = shape.kv_bytes(bench.prefix), cut(url)
    return RemoteFindings(bench.prefix, num_bytes, moves + found.moves, found.overlaps, found.exact, server)


def _measure_tier(bench: Bench, setup: TierSetup, slab: torch.Tensor, plain: Plain) -> list[TierMove]:
    [tier] = open_tiers(setup)
    alone = tier_alone(tier, slab, bench.prefix // bench.shape.chunk_size)
    moves = compare_moves(bench, {"tier, put": alone.write, "tier, get": alone.read}, plain, plain.remove_old)
    alone.close()
    return moves
