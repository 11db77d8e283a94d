"""The pipeline alone: a tier and a model whose times are known, so that the ideal is known too."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lwkv.benchmarks.bench.findings import Findings, table
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.measured_engine import MeasuredEngine, Slots
from lwkv.benchmarks.measuring.timing import median_ratio
from lwkv.benchmarks.throttled.model import HostModel, Model, StreamModel
from lwkv.benchmarks.throttled.tier import ThrottledTier
from lwkv.engine import Request
from lwkv.steps import LayerSteps

LOADS_PER_COMPUTE = (0.25, 1.0, 4.0)
COMPUTE_MS = 10.0
NUM_LAYERS = 16
# One request of a few chunks: the bytes do not matter here.
NUM_CHUNKS = 4
MODELS = {
    StreamModel.where: "a model that computes on a stream, as devices do",
    HostModel.where: "a model that computes on the host's thread, as engines on the CPU do",
}


@dataclass(frozen=True)
class ThrottledRun:
    """Medians of steps whose layers take `load_ms` to read and `compute_ms` to compute.

    `ideal_ms` is the least that this can take: the longer of the two for every layer, and the shorter once.
    Both are as long as they really were in each step. `wanted` is load over compute as it was asked for.
    `model` says where it computes: on a "stream", or on the thread of the "host".
    """

    model: str
    wanted: float
    load_ms: float
    compute_ms: float
    ideal_ms: float
    total_ms: float
    ratio: float


@dataclass(frozen=True)
class Throttled(Findings):
    """Steps over a throttled tier; `exact` says whether all bytes of every run arrived."""

    num_layers: int
    runs: list[ThrottledRun]
    exact: bool

    def lines(self, absolute: bool) -> Iterator[str]:
        yield f"{self.num_layers} layers from a throttled tier"
        for model, told in MODELS.items():
            rows = [_row(run) for run in self.runs if run.model == model]
            if rows:
                yield f"{told}: load / compute of a layer"
                yield from table(["", "total, ms", "ideal, ms", "total / ideal"], rows)
            else:
                yield f"{told}: this platform has no timing events"

    def faults(self) -> Iterator[str]:
        if not self.exact:
            yield "throttled tier: the bytes that were loaded differ from those that were stored"


def measure_throttled(bench: Bench) -> Throttled:
    """Load one prompt from the tier while a model computes, for loads faster and slower than the model."""
    tier = ThrottledTier()
    shape = replace(bench.shape, num_layers=NUM_LAYERS)
    with bench.new_engine(NUM_CHUNKS * shape.chunk_size, shape, prompts=2, tiers=[tier]) as measured:
        measured.fill()
        kept = measured.new_prompt()
        for prompt in (kept, measured.new_prompt(), measured.new_prompt()):
            measured.keep(prompt)
        # What comes from the tier is not kept in host memory, where the next load would find it.
        measured.engine.freeze()
        results = [
            _measure_run(bench, measured, kept, tier, model, load)
            for model in _models(bench)
            for load in LOADS_PER_COMPUTE
        ]
        runs, exact = zip(*results, strict=True)
        return Throttled(measured.shape.num_layers, list(runs), all(exact))


def _models(bench: Bench) -> list[Model]:
    arguments = bench.platform, bench.device, COMPUTE_MS / 1e3
    timing = bench.platform.features.event_timing
    return [*([StreamModel(*arguments)] if timing else []), HostModel(*arguments)]


def _measure_run(
    bench: Bench, measured: MeasuredEngine, kept: Slots, tier: ThrottledTier, model: Model, wanted: float
) -> tuple[ThrottledRun, bool]:
    """The run, and whether what its last step loaded is right."""
    num_layers = measured.shape.num_layers
    tier.seconds_per_byte = wanted * COMPUTE_MS / 1e3 / (measured.num_tokens * measured.shape.token_bytes)
    steps = LayerSteps(measured.engine)
    layers: list[tuple[float, float]] = []

    def step() -> None:
        tier.reads.clear()
        with model.running():
            steps.begin([Request(kept, measured.target)], [])
            steps.start_load_kv()
            for layer in range(num_layers):
                steps.wait_for_layer_load(layer)
                model.compute()
            steps.wait_for_save()
            measured.platform.synchronize_stream(measured.platform.current_stream(measured.device))
        layers.append((_mean_ms(tier.reads), model.layer_ms()))

    measured.clear_target()
    totals = bench.alternate_ms([step], before=measured.flush)[0]
    # As in the times, the first round is not counted.
    ideals = [num_layers * max(pair) + min(pair) for pair in layers[1:]]
    run = ThrottledRun(
        model=model.where,
        wanted=wanted,
        load_ms=statistics.median(load for load, _ in layers[1:]),
        compute_ms=statistics.median(compute for _, compute in layers[1:]),
        ideal_ms=statistics.median(ideals),
        total_ms=statistics.median(totals),
        ratio=median_ratio(totals, ideals),
    )
    return run, measured.places_agree()


def _mean_ms(seconds: list[float]) -> float:
    return statistics.fmean(seconds) * 1e3


def _row(run: ThrottledRun) -> list[str]:
    return [f"  {run.wanted:g}", f"{run.total_ms:.1f}", f"{run.ideal_ms:.1f}", f"{run.ratio:.3f}"]
