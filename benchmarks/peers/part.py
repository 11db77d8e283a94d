"""LMCache beside lwkv: the same caches, the same device, the same process."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lwkv.benchmarks.bench.findings import Absent, Findings, table
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.measured_engine import MeasuredEngine, Slots
from lwkv.benchmarks.measuring.timing import gb_per_s
from lwkv.benchmarks.peers.lmcache import Library, LMCachePeer, import_lmcache
from lwkv.benchmarks.prefills.stack import Stack

# vLLM's own layout when this was LMCache's main one; its binary knows it.
LAYOUT = "vllm_2bnhd"
SMALLEST_SUFFIX = 256
SPARE_PROMPTS = 4


@dataclass(frozen=True)
class PeerMove:
    """As `moves.Move`, in LMCache's `mode`: "layerwise" or "bulk"."""

    mode: str
    name: str
    gb_s: float
    ceiling_gb_s: float
    ratio: float
    exact: bool


@dataclass(frozen=True)
class PeerOverlap:
    """As `overlap.Overlap`, through LMCache."""

    suffix: int
    compute_ms: float
    layerwise_ms: float
    bulk_ms: float


@dataclass(frozen=True)
class Peers(Findings):
    """LMCache in both its modes. `native`: its compiled operations loaded; `label` says so in words."""

    version: str
    native: bool
    label: str
    moves: list[PeerMove]
    overlaps: list[PeerOverlap]

    def lines(self, absolute: bool) -> Iterator[str]:
        yield self.label if self.native else f"{self.label}: its compiled operations did not load"
        rows = [
            [
                f"{move.mode} {move.name}",
                f"{move.gb_s:.1f}",
                f"{move.ceiling_gb_s:.1f}",
                f"{move.ratio:.3f}",
                "exact" if move.exact else "WRONG",
            ]
            for move in self.moves
        ]
        yield from table(["", "GB/s", "plain copy", "ratio", "bytes"], rows)
        rows = [
            [str(item.suffix), *(f"{ms:.1f}" for ms in (item.compute_ms, item.layerwise_ms, item.bulk_ms))]
            for item in self.overlaps
        ]
        yield from table(["suffix, ms", "compute", "layerwise", "bulk, then compute"], rows)


def measure_peers(bench: Bench) -> Peers | Absent:
    """Measure LMCache as lwkv is measured in moves and overlap, or tell why that cannot be."""
    try:
        library = import_lmcache()
    except ImportError as error:
        return Absent(f"LMCache is not measured, it cannot be imported: {error}")
    if bench.shape.use_mla:
        return Absent(f"LMCache is not measured for {bench.shape.name}: only for caches with K and V")
    if bench.device.type == "cpu":
        return Absent(f"{library.label} is not measured: it has no connector for caches on the host")
    return measure_library(bench, library)


def measure_library(bench: Bench, library: Library) -> Peers:
    """Measure moves in both modes, then prefills of the suffixes that are not the very small ones."""
    moves: list[PeerMove] = []
    suffixes = [suffix for suffix in bench.suffixes if suffix >= SMALLEST_SUFFIX] or list(bench.suffixes)
    with bench.new_engine(layout=LAYOUT, prompts=1) as measured:
        measured.fill()
        prompts = bench.repeats + SPARE_PROMPTS
        by_mode: dict[str, list[tuple[float, float]]] = {}
        for mode in ("layerwise", "bulk"):
            with LMCachePeer(measured, mode == "layerwise", prompts) as peer:
                kept = measured.new_prompt()
                moves += _measure_moves(bench, measured, peer, mode, kept)
                by_mode[mode] = [_measure_prefill(bench, measured, peer, kept, suffix) for suffix in suffixes]
    pairs = zip(suffixes, by_mode["layerwise"], by_mode["bulk"], strict=True)
    overlaps = [PeerOverlap(suffix, first[0], first[1], second[1]) for suffix, first, second in pairs]
    return Peers(library.version, library.native, library.label, moves, overlaps)


def _measure_moves(
    bench: Bench, measured: MeasuredEngine, peer: LMCachePeer, mode: str, kept: Slots
) -> Iterator[PeerMove]:
    num_bytes = bench.shape.kv_bytes(bench.prefix)
    measured.clear_target()
    load_ms = bench.median_ms(lambda: peer.load(kept), before=lambda: peer.keep(kept))
    exact = measured.places_agree()
    yield _move(mode, "load", gb_per_s(num_bytes, load_ms), bench.ceilings.load_gb_s, exact)
    stored: list[Slots] = []

    def save() -> None:
        stored.append(measured.new_prompt())
        peer.save(stored[-1])

    save_ms = bench.median_ms(save)
    measured.clear_target()
    peer.load(stored[-1])
    exact = measured.places_agree()
    yield _move(mode, "save", gb_per_s(num_bytes, save_ms), bench.ceilings.save_gb_s, exact)


def _move(mode: str, name: str, speed: float, ceiling: float, exact: bool) -> PeerMove:
    return PeerMove(mode, name, speed, ceiling, speed / ceiling, exact)


@torch.inference_mode()
def _measure_prefill(
    bench: Bench, measured: MeasuredEngine, peer: LMCachePeer, kept: Slots, suffix: int
) -> tuple[float, float]:
    """Milliseconds of the computing alone, and with the load: by layers, or in bulk before it."""
    stack = Stack(measured.shape, measured.num_tokens, suffix, measured.device)

    def compute() -> None:
        _forward(stack, iter(()))

    def loaded() -> None:
        if peer.layerwise:
            steps = peer.load_by_layers(kept)
            next(steps)
            next(steps)
            _forward(stack, steps)
        else:
            peer.load(kept)
            compute()

    alone, both = bench.alternate_ms([compute, loaded], before=lambda: peer.keep(kept))
    return statistics.median(alone), statistics.median(both)


def _forward(stack: Stack, steps: Iterator[None]) -> None:
    x = stack.input
    for layer in range(stack.shape.num_layers):
        q = stack.project(layer, x)
        next(steps, None)
        x = stack.mix(layer, stack.attend(layer, x, q))
