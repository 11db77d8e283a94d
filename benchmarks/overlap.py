"""Prefill of a suffix over a cached prefix: computing and loading, apart and layer by layer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from lwkv.benchmarks.bed import Bed
from lwkv.benchmarks.stack import Stack
from lwkv.benchmarks.timing import median_ms
from lwkv.engine import Request
from lwkv.steps import LayerSteps


@dataclass(frozen=True, slots=True)
class Overlap:
    """Milliseconds of one prefill; `wait_us` is the host's median time in the wait hook of a layer."""

    suffix: int
    compute: float
    load: float
    layerwise: float
    bulk: float
    wait_us: float
    start_us: float

    @property
    def ratio(self) -> float:
        """Layerwise over the larger of its two parts: 1 is perfect."""
        return self.layerwise / max(self.compute, self.load)


@dataclass(slots=True)
class HostTimes:
    """Seconds the host spent in the hooks, call by call."""

    waits: list[float] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)


@torch.inference_mode()
def measure_overlap(bed: Bed, suffix: int, repeats: int) -> Overlap:
    """Measure a suffix of `suffix` tokens over the bed's stored prompt 0."""
    stack = Stack(bed.shape, bed.num_tokens, suffix, bed.device)
    bed.store(bed.prompt(0))
    steps, hosts = LayerSteps(bed.engine), HostTimes()
    request = Request(bed.prompt(0), bed.target[: bed.num_tokens])

    def compute() -> None:
        _forward(stack, None, hosts)

    def load() -> None:
        bed.engine.retrieve(request.tokens, slot_mapping=request.slot_mapping)

    def layerwise() -> None:
        steps.begin([request], [])
        with _timed(hosts.starts):
            steps.start_load_kv()
        _forward(stack, steps, hosts)
        steps.wait_for_save()

    def bulk() -> None:
        load()
        compute()

    times = [median_ms(bed.platform, bed.device, work, repeats) for work in (compute, load, layerwise, bulk)]
    waits, starts = statistics.median(hosts.waits) * 1e6, statistics.median(hosts.starts) * 1e6
    return Overlap(suffix, *times, waits, starts)


@dataclass(frozen=True, slots=True)
class StoreCost:
    """Milliseconds of one prefill without and with storing it by layers."""

    tokens: int
    without: float
    storing: float
    save_us: float


@torch.inference_mode()
def measure_store_cost(bed: Bed, repeats: int) -> StoreCost:
    """Measure a prefill of the bed's whole prompt, with a new prompt to store each time."""
    stack = Stack(bed.shape, 0, bed.num_tokens, bed.device)
    steps, hosts = LayerSteps(bed.engine), HostTimes()
    number = 1000

    def without() -> None:
        _forward(stack, None, hosts)

    def storing() -> None:
        nonlocal number
        number += 1
        steps.begin([], [Request(bed.prompt(number), bed.source[: bed.num_tokens])])
        _forward(stack, steps, hosts)
        steps.wait_for_save()

    plain = median_ms(bed.platform, bed.device, without, repeats)
    with_store = median_ms(bed.platform, bed.device, storing, repeats, before=bed.engine.flush)
    again = median_ms(bed.platform, bed.device, without, repeats)
    return StoreCost(bed.num_tokens, (plain + again) / 2, with_store, statistics.median(hosts.saves) * 1e6)


def _forward(stack: Stack, steps: LayerSteps | None, hosts: HostTimes) -> torch.Tensor:
    x = stack.input
    for layer in range(stack.shape.num_layers):
        # As in vLLM: keys and values of the new tokens first, then the wait, then attention.
        q = stack.project(layer, x)
        if steps is not None:
            with _timed(hosts.waits):
                steps.wait_for_layer_load(layer)
        x = stack.attend(layer, x, q)
        if steps is not None:
            with _timed(hosts.saves):
                steps.save_kv_layer(layer)
        x = stack.mix(layer, x)
    return x


@contextmanager
def _timed(times: list[float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    times.append(time.perf_counter() - start)
