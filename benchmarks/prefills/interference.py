"""How much a transfer that nobody waits for slows the model's own kernels."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lwkv.benchmarks.bench.findings import Absent, Findings
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.measured_engine import MeasuredEngine, Slots
from lwkv.benchmarks.measuring.timing import median_ratio
from lwkv.benchmarks.prefills.prefill import prefill
from lwkv.benchmarks.prefills.stack import Stack
from lwkv.platforms import Event

# A transfer that goes on for less than this share of the prefill may have ended before it.
SHORT = 0.05


@dataclass(frozen=True)
class Interference(Findings):
    """Device milliseconds of a prefill alone, and its ratio with a load or a save under way.

    `load_left_ms` and `save_left_ms` are the least that the transfer went on after the prefill had ended:
    next to nothing means that it did not last as long, and that the ratio says too little.
    """

    suffix: int
    transfer_tokens: int
    alone_ms: float
    load_ratio: float
    save_ratio: float
    load_left_ms: float
    save_left_ms: float

    def lines(self, absolute: bool) -> Iterator[str]:
        yield f"prefill of {self.suffix} tokens beside a transfer of {self.transfer_tokens}, over alone"
        for name, ratio, left in (
            ("load", self.load_ratio, self.load_left_ms),
            ("save", self.save_ratio, self.save_left_ms),
        ):
            ended = "  (the transfer ended first: too little)" if left < SHORT * self.alone_ms else ""
            yield f"{name}  {ratio:.3f}{ended}"


@torch.inference_mode()
def measure_interference(bench: Bench) -> Interference | Absent:
    """Time the kernels of an eighth of the prefix, beside transfers of four times the prefix."""
    if not bench.platform.features.event_timing:
        return Absent(f"platform {bench.platform.name!r} has no timing events")
    suffix, num_tokens = bench.prefix // 8, 4 * bench.prefix
    stack = Stack(bench.shape, bench.prefix, suffix, bench.device)
    with bench.new_engine(num_tokens, prompts=3) as measured:
        kept = measured.new_prompt()
        rounds = [_measure_round(measured, stack, kept) for _ in range(bench.repeats + 1)][1:]
    alone, loading, saving = ([run[i][0] for run in rounds] for i in range(3))
    ratios = median_ratio(loading, alone), median_ratio(saving, alone)
    left = (min(run[i][1] for run in rounds) for i in (1, 2))
    return Interference(suffix, num_tokens, statistics.median(alone), *ratios, *left)


def _measure_round(measured: MeasuredEngine, stack: Stack, kept: Slots) -> list[tuple[float, float]]:
    """Alone, beside a load and beside a save: ms of the kernels, and ms that the transfer had left."""
    measured.keep(kept)
    loading = measured.engine.retrieve_layer(kept, slot_mapping=measured.target, sync=False)
    storing = measured.engine.store_layer(measured.new_prompt(), slot_mapping=measured.source)
    num_layers = measured.shape.num_layers
    # A load has a first step that only counts.
    transfers = ((iter(()), 0), (loading, 1 + num_layers), (storing, num_layers))
    return [_measure_beside(measured, stack, transfer, steps) for transfer, steps in transfers]


def _measure_beside(
    measured: MeasuredEngine, stack: Stack, transfer: Iterator[object], num_steps: int
) -> tuple[float, float]:
    measured.flush()
    measured.platform.synchronize_device(measured.device)
    started, computed, moved = (measured.platform.new_event(timing=True) for _ in range(3))
    for _ in range(num_steps):
        next(transfer)
    _record(measured, started)
    prefill(stack)
    _record(measured, computed)
    # What is left of the generator makes the current stream wait for the transfer.
    for _ in transfer:
        pass
    _record(measured, moved)
    measured.platform.synchronize_device(measured.device)
    return _elapsed(measured, started, computed), _elapsed(measured, computed, moved)


def _record(measured: MeasuredEngine, event: Event) -> None:
    measured.platform.record(event, measured.platform.current_stream(measured.device))


def _elapsed(measured: MeasuredEngine, start: Event, end: Event) -> float:
    elapsed = measured.platform.elapsed_ms(start, end)
    if elapsed is None:
        raise RuntimeError(f"platform {measured.platform.name!r} says it has event_timing, but timed nothing")
    return elapsed
