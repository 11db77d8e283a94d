"""Host time of a layer's steps, whatever the number of chunks, and of finding what is cached."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lwkv.benchmarks.bench.findings import Findings, table
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.measured_engine import MeasuredEngine, Slots
from lwkv.benchmarks.prefills.prefill import HostTimes, layer_host_ms, median_host_ms, timed
from lwkv.engine import Request
from lwkv.keys import chunk_keys
from lwkv.steps import LayerSteps

CHUNKS = (8, 32, 128)
HASHED_TOKENS = 1 << 20


@dataclass(frozen=True)
class HostTime:
    """Host milliseconds without a model: of a call of start_load_kv, and of a hook, on average over layers.

    A layer's pages lie side by side on the host, unless `scattered`. The host never waits for the device,
    but a full queue of it is part of the time.
    """

    chunks: int
    start_ms: float
    wait_ms: float
    scattered_start_ms: float
    scattered_wait_ms: float
    save_ms: float


@dataclass(frozen=True)
class HostCost(Findings):
    """`empty_ms` is a layer's wait hook where nothing is cached; `lookup_ms` is of the run's prefix."""

    empty_ms: float
    tokens_hashed_per_s: float
    lookup_ms: float
    times: list[HostTime]

    def lines(self, absolute: bool) -> Iterator[str]:
        yield f"a layer's wait hook with nothing to load: {self.empty_ms * 1e3:.1f} us"
        yield f"tokens hashed: {self.tokens_hashed_per_s / 1e6:.1f} million a second"
        yield f"lookup of a known prefix: {self.lookup_ms * 1e3:.0f} us"
        if absolute:  # on the host's own platform a hook waits for the bytes
            yield from _hooks(self.times)


def measure_host(bench: Bench) -> HostCost:
    """Drive the hooks of a step layer by layer, with nothing computed between them."""
    times = [_measure_hooks(bench, chunks) for chunks in CHUNKS]
    return HostCost(*_measure_finding(bench), times)


def _measure_hooks(bench: Bench, chunks: int) -> HostTime:
    with bench.new_engine(chunks * bench.shape.chunk_size, prompts=3) as measured:
        side_by_side, scattered = measured.new_prompt(), measured.new_prompt()
        measured.keep(side_by_side)
        _keep_by_chunks(measured, scattered)
        # Loads first: what is saved takes the place of what is kept.
        start_ms, wait_ms = _measure_loads(bench, measured, side_by_side)
        scattered_start_ms, scattered_wait_ms = _measure_loads(bench, measured, scattered)
        save_ms = _measure_saves(bench, measured)
    return HostTime(chunks, start_ms, wait_ms, scattered_start_ms, scattered_wait_ms, save_ms)


def _keep_by_chunks(measured: MeasuredEngine, tokens: Slots) -> None:
    # A chunk stored alone has its layers side by side: the next chunk's page of a layer is far away.
    size = measured.shape.chunk_size
    for end in range(size, len(tokens) + 1, size):
        measured.keep(tokens[:end])


def _measure_loads(bench: Bench, measured: MeasuredEngine, kept: Slots) -> tuple[float, float]:
    steps, hosts = LayerSteps(measured.engine), HostTimes()

    def load() -> None:
        with timed(hosts.starts):
            steps.begin([Request(kept, measured.target)], [])
            (found,) = steps.start_load_kv()
        if found != len(kept):
            raise RuntimeError(f"{found} of {len(kept)} tokens are cached: this would time a miss")
        for layer in range(measured.shape.num_layers):
            with timed(hosts.waits):
                steps.wait_for_layer_load(layer)
        steps.wait_for_save()

    bench.median_ms(load)
    return median_host_ms(hosts.starts), layer_host_ms(hosts.waits, measured.shape.num_layers)


def _measure_saves(bench: Bench, measured: MeasuredEngine) -> float:
    steps, hosts = LayerSteps(measured.engine), HostTimes()

    def save() -> None:
        steps.begin([], [Request(measured.new_prompt(), measured.source)])
        for layer in range(measured.shape.num_layers):
            with timed(hosts.saves):
                steps.save_kv_layer(layer)
        steps.wait_for_save()

    bench.median_ms(save, before=measured.flush)
    measured.flush()
    return layer_host_ms(hosts.saves, measured.shape.num_layers)


def _hooks(times: list[HostTime]) -> Iterator[str]:
    head = ["host time in us", "start", "wait hook", "start, scattered", "wait hook, scattered", "save hook"]
    rows = []
    for item in times:
        loads = item.start_ms, item.wait_ms, item.scattered_start_ms, item.scattered_wait_ms
        rows.append([f"{item.chunks} chunks", *(f"{ms * 1e3:.0f}" for ms in (*loads, item.save_ms))])
    yield from table(head, rows)


def _measure_finding(bench: Bench) -> tuple[float, float, float]:
    waits: list[float] = []
    hashed: list[float] = []
    lookups: list[float] = []
    tokens = np.arange(HASHED_TOKENS, dtype=np.int64)
    with bench.new_engine(prompts=1) as measured:
        steps, kept = LayerSteps(measured.engine), measured.new_prompt()
        measured.keep(kept)
        for _ in range(bench.repeats):
            steps.begin([Request(measured.new_prompt(), measured.target)], [])
            steps.start_load_kv()
            for layer in range(measured.shape.num_layers):
                with timed(waits):
                    steps.wait_for_layer_load(layer)
            steps.wait_for_save()
            # Hashing gives other threads their turn after each chunk; here that would be the load's end.
            measured.flush()
            with timed(hashed):
                chunk_keys(tokens, measured.shape.chunk_size, "bench")
            with timed(lookups):
                measured.engine.lookup(kept)
    return median_host_ms(waits), HASHED_TOKENS / statistics.median(hashed), median_host_ms(lookups)
