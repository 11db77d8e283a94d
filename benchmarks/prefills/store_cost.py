"""What storing adds to a prefill."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lwkv.benchmarks.bench.findings import Findings
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.timing import median_ratio
from lwkv.benchmarks.prefills.prefill import HostTimes, layer_host_ms, prefill
from lwkv.benchmarks.prefills.stack import Stack
from lwkv.engine import Request
from lwkv.steps import LayerSteps


@dataclass(frozen=True)
class StoreCost(Findings):
    """Milliseconds of a prefill of `tokens` tokens without and with storing all of them by layers.

    `ratio` is the median of the ratios of two neighbouring runs; `save_ms` is the host's time in the save
    hook, on average over the layers.
    """

    tokens: int
    without_ms: float
    storing_ms: float
    ratio: float
    save_ms: float

    def lines(self, absolute: bool) -> Iterator[str]:
        if absolute:
            times = f"{self.without_ms:.1f} ms, storing all of them {self.storing_ms:.1f} ms"
            yield f"prefill of {self.tokens} tokens: {times}"
        yield f"with storing over without: {self.ratio:.3f}"
        if absolute:
            yield f"host time in the save hook of a layer: {self.save_ms * 1e3:.0f} us"


@torch.inference_mode()
def measure_store_cost(bench: Bench) -> StoreCost:
    """Measure a prefill of the run's whole prefix, with a new prompt to store each time."""
    stack, hosts = Stack(bench.shape, 0, bench.prefix, bench.device), HostTimes()
    with bench.new_engine() as measured:
        steps = LayerSteps(measured.engine)

        def without() -> None:
            prefill(stack)

        def storing() -> None:
            steps.begin([], [Request(measured.new_prompt(), measured.source)])
            prefill(stack, steps, hosts)
            steps.wait_for_save()

        plain, stored = bench.alternate_ms([without, storing], before=measured.flush)
    medians = statistics.median(plain), statistics.median(stored)
    save_ms = layer_host_ms(hosts.saves, bench.shape.num_layers)
    return StoreCost(bench.prefix, *medians, median_ratio(stored, plain), save_ms)
