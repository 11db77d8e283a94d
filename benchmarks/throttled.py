"""The pipeline alone: a tier and a model whose times are known, so that the ideal is known too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lwkv.benchmarks.bed import Bed, Slots
from lwkv.benchmarks.bench import Bench
from lwkv.benchmarks.findings import Findings, table
from lwkv.benchmarks.prefill import timed
from lwkv.benchmarks.throttled_tier import ThrottledTier
from lwkv.benchmarks.timing import median_ratio
from lwkv.engine import Request
from lwkv.steps import LayerSteps

LOADS_PER_COMPUTE = (0.25, 1.0, 4.0)
COMPUTE_MS = 10.0
NUM_LAYERS = 16
# One request of a few chunks: the bytes do not matter here.
NUM_CHUNKS = 4


@dataclass(frozen=True)
class ThrottledRun:
    """Medians of steps whose layers take `load_ms` to read and `compute_ms` to compute.

    `ideal_ms` is the least that this can take: the longer of the two for every layer, and the shorter once.
    Both are as long as the sleeps really were. `wanted` is load over compute as it was asked for.
    """

    wanted: float
    load_ms: float
    compute_ms: float
    ideal_ms: float
    total_ms: float
    ratio: float


@dataclass(frozen=True)
class Throttled(Findings):
    """Steps over a throttled tier; `exact` says whether all bytes arrived."""

    num_layers: int
    runs: list[ThrottledRun]
    exact: bool

    def lines(self, absolute: bool) -> Iterator[str]:
        yield f"{self.num_layers} layers from a throttled tier, a model that sleeps"
        rows = [
            [
                f"load / compute of a layer = {run.wanted:g}",
                *(f"{ms:.1f}" for ms in (run.total_ms, run.ideal_ms)),
                f"{run.ratio:.3f}",
            ]
            for run in self.runs
        ]
        yield from table(["", "total, ms", "ideal, ms", "total / ideal"], rows)

    def faults(self) -> Iterator[str]:
        if not self.exact:
            yield "throttled tier: the bytes that were loaded differ from those that were stored"


def measure_throttled(bench: Bench) -> Throttled:
    """Load one prompt from the tier while a model sleeps, for loads shorter and longer than the computing."""
    tier = ThrottledTier()
    shape = replace(bench.shape, num_layers=NUM_LAYERS)
    with bench.bed(NUM_CHUNKS * shape.chunk_size, shape, prompts=2, tiers=[tier]) as bed:
        bed.fill()
        kept = bed.new_prompt()
        for prompt in (kept, bed.new_prompt(), bed.new_prompt()):
            bed.keep(prompt)
        # What comes from the tier is not kept in host memory, where the next load would find it.
        bed.engine.freeze()
        runs = [_measure_run(bench, bed, kept, tier, load) for load in LOADS_PER_COMPUTE]
        return Throttled(bed.shape.num_layers, runs, bed.places_agree())


def _measure_run(bench: Bench, bed: Bed, kept: Slots, tier: ThrottledTier, wanted: float) -> ThrottledRun:
    num_layers = bed.shape.num_layers
    tier.seconds_per_byte = wanted * COMPUTE_MS / 1e3 / (bed.num_tokens * bed.shape.token_bytes)
    steps = LayerSteps(bed.engine)
    sleeps: list[tuple[float, float]] = []

    def step() -> None:
        computed: list[float] = []
        tier.reads.clear()
        steps.begin([Request(kept, bed.target)], [])
        steps.start_load_kv()
        for layer in range(num_layers):
            steps.wait_for_layer_load(layer)
            # The model is on the host here: it may not begin before its layer is there.
            bed.platform.synchronize_stream(bed.platform.current_stream(bed.device))
            with timed(computed):
                time.sleep(COMPUTE_MS / 1e3)
        steps.wait_for_save()
        sleeps.append((_mean_ms(tier.reads), _mean_ms(computed)))

    bed.clear_target()
    totals = bench.alternate_ms([step], before=bed.flush)[0]
    # As in the times, the first round is not counted.
    ideals = [num_layers * max(pair) + min(pair) for pair in sleeps[1:]]
    return ThrottledRun(
        wanted=wanted,
        load_ms=statistics.median(load for load, _ in sleeps[1:]),
        compute_ms=statistics.median(compute for _, compute in sleeps[1:]),
        ideal_ms=statistics.median(ideals),
        total_ms=statistics.median(totals),
        ratio=median_ratio(totals, ideals),
    )


def _mean_ms(seconds: list[float]) -> float:
    return statistics.fmean(seconds) * 1e3
