"""Prefill of a suffix over a cached prefix: computing and loading, apart and layer by layer."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lwkv.benchmarks.bench.findings import Findings, table
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.measured_engine import MeasuredEngine, Slots
from lwkv.benchmarks.prefills.prefill import HostTimes, layer_host_ms, median_host_ms, prefill, timed
from lwkv.benchmarks.prefills.stack import Stack
from lwkv.engine import Request
from lwkv.steps import LayerSteps


@dataclass(frozen=True)
class Overlap:
    """Milliseconds of one prefill of `suffix` tokens over `prefix` cached ones.

    `ratio` is layerwise over the larger of compute and load: 1 is perfect. `wait_ms` is the host's time in
    the wait hook, on average over the layers, `start_ms` that in start_load_kv.
    """

    prefix: int
    suffix: int
    compute_ms: float
    load_ms: float
    layerwise_ms: float
    bulk_ms: float
    ratio: float
    wait_ms: float
    start_ms: float


@dataclass(frozen=True)
class Overlaps(Findings):
    """One Overlap for each suffix, the run's own prefix first."""

    overlaps: list[Overlap]

    def lines(self, absolute: bool) -> Iterator[str]:
        yield from overlap_lines(self.overlaps, absolute)


def measure_overlaps(bench: Bench) -> Overlaps:
    """Measure all suffixes over the run's prefix, and some over a quarter of it and over four times it."""
    some = bench.suffixes[2::2] or bench.suffixes[-1:]
    found = []
    for prefix, suffixes in (
        (bench.prefix, bench.suffixes),
        (bench.prefix // 4, some),
        (bench.prefix * 4, some),
    ):
        with bench.new_engine(prefix, prompts=1) as measured:
            measured.fill()
            kept = measured.new_prompt()
            found += [measure_overlap(bench, measured, kept, suffix) for suffix in suffixes]
    return Overlaps(found)


@torch.inference_mode()
def measure_overlap(bench: Bench, measured: MeasuredEngine, kept: Slots, suffix: int) -> Overlap:
    """Compute a suffix and load `kept`, apart, layer by layer, and one after the other."""
    stack = Stack(measured.shape, measured.num_tokens, suffix, measured.device)
    steps, hosts = LayerSteps(measured.engine), HostTimes()

    def compute() -> None:
        prefill(stack)

    def load() -> None:
        measured.load(kept)

    def layerwise() -> None:
        steps.begin([Request(kept, measured.target)], [])
        with timed(hosts.starts):
            steps.start_load_kv()
        prefill(stack, steps, hosts)
        steps.wait_for_save()

    def bulk() -> None:
        load()
        compute()

    times = bench.alternate_ms([compute, load, layerwise, bulk], before=lambda: measured.keep(kept))
    compute_ms, load_ms, layerwise_ms, bulk_ms = (statistics.median(taken) for taken in times)
    return Overlap(
        prefix=measured.num_tokens,
        suffix=suffix,
        compute_ms=compute_ms,
        load_ms=load_ms,
        layerwise_ms=layerwise_ms,
        bulk_ms=bulk_ms,
        ratio=layerwise_ms / max(compute_ms, load_ms),
        wait_ms=layer_host_ms(hosts.waits, measured.shape.num_layers),
        start_ms=median_host_ms(hosts.starts),
    )


def overlap_lines(overlaps: list[Overlap], absolute: bool) -> Iterator[str]:
    """Tell them to a reader."""
    yield "ms of computing a suffix, of loading its prefix, and of both; ratio: layerwise over the larger"
    yield from _times(overlaps) if absolute else _ratios(overlaps)


def _times(overlaps: list[Overlap]) -> Iterator[str]:
    head = ["prefix + suffix", "compute", "load", "layerwise", "bulk, then compute", "ratio"]
    hooks = ["wait hook, us", "start, us"]
    rows = [
        [
            f"{item.prefix} + {item.suffix}",
            *(f"{ms:.1f}" for ms in (item.compute_ms, item.load_ms, item.layerwise_ms, item.bulk_ms)),
            f"{item.ratio:.3f}",
            *(f"{ms * 1e3:.0f}" for ms in (item.wait_ms, item.start_ms)),
        ]
        for item in overlaps
    ]
    yield from table(head + hooks, rows)


def _ratios(overlaps: list[Overlap]) -> Iterator[str]:
    rows = [
        [
            f"{item.prefix} + {item.suffix}",
            f"{item.load_ms / item.compute_ms:.2f}",
            f"{item.layerwise_ms / item.bulk_ms:.2f}",
            f"{item.ratio:.2f}",
        ]
        for item in overlaps
    ]
    yield from table(["prefix + suffix", "load / compute", "layerwise / bulk, then compute", "ratio"], rows)
