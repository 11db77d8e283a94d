"""The remote tier: the engine's loads and stores against its client alone."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lwkv.benchmarks.bench import Bench
from lwkv.benchmarks.findings import Absent, Findings
from lwkv.benchmarks.overlap import Overlap, measure_overlap, overlap_lines
from lwkv.benchmarks.plain_remote import open_plain, tier_alone
from lwkv.benchmarks.tier_moves import Plain, TierMove, compare_moves, measure_moves, move_lines
from lwkv.config import Config
from lwkv.counters import Counters
from lwkv.doctor_tiers import without_secrets
from lwkv.storage import TierSetup
from lwkv.storage.tiers import open_tiers


@dataclass(frozen=True)
class RemoteFindings(Findings):
    """Moves by the tier alone, then by the engine, of a prompt that no other tier keeps; prefills over it."""

    server: str
    tokens: int
    num_bytes: int
    moves: list[TierMove]
    overlaps: list[Overlap]
    exact: bool

    def lines(self, absolute: bool) -> Iterator[str]:
        yield f"{self.tokens} tokens, {self.num_bytes / 1e9:.3g} GB, from {self.server} to device and back"
        yield from move_lines(self.moves, "client alone")
        yield from overlap_lines(self.overlaps, absolute)

    def faults(self) -> Iterator[str]:
        if not self.exact:
            yield "remote: the bytes that were loaded differ from those that were stored"


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
    with bench.bed(prompts=2, config=config, first_prompt=secrets.randbits(32)) as bed:
        bed.fill()
        kept = bed.new_prompt()
        bed.keep(kept)
        moves += measure_moves(bench, bed, kept, plain)
        overlaps = [measure_overlap(bench, bed, kept, suffix) for suffix in bench.suffixes]
        bed.clear_target()
        bed.load(kept)
        exact = bed.places_agree()
    plain.close()
    num_bytes = shape.kv_bytes(bench.prefix)
    return RemoteFindings(without_secrets(url), bench.prefix, num_bytes, moves, overlaps, exact)


def _measure_tier(bench: Bench, setup: TierSetup, slab: torch.Tensor, plain: Plain) -> list[TierMove]:
    [tier] = open_tiers(setup)
    alone = tier_alone(tier, slab, bench.prefix // bench.shape.chunk_size)
    moves = compare_moves(bench, {"tier, put": alone.write, "tier, get": alone.read}, plain, plain.remove_old)
    alone.close()
    return moves
