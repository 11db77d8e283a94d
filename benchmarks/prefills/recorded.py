"""One overlapped prefill as a timeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lwkv.benchmarks.bench.findings import Findings
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.measured_engine import MeasuredEngine, Slots
from lwkv.benchmarks.prefills.stack import Stack
from lwkv.engine import Request
from lwkv.steps import LayerSteps
from lwkv.telemetry.timeline import Lane, Span, Timeline, hidden_and_exposed


@dataclass(frozen=True)
class RecordedSpan:
    """When one layer was loaded, computed or saved, in ms from the start of the step."""

    lane: Lane
    layer: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Recorded(Findings):
    """A prefill of `suffix` tokens that loads `prefix` tokens and stores its own, layer by layer.

    Hidden and exposed are of the load, as in `lwkv.telemetry.timeline`.
    """

    prefix: int
    suffix: int
    hidden_ms: float
    exposed_ms: float
    spans: list[RecordedSpan]

    def timeline(self) -> list[Span]:
        """The spans for a picture or a trace."""
        return [Span(span.lane, span.layer, span.start_ms / 1e3, span.end_ms / 1e3) for span in self.spans]

    def lines(self, absolute: bool) -> Iterator[str]:
        hidden = self.hidden_ms / max(self.hidden_ms + self.exposed_ms, 1e-9)
        yield f"prefill of {self.suffix} tokens over {self.prefix}: {hidden:.0%} of the load hidden"
        if absolute:
            yield f"hidden {self.hidden_ms:.2f} ms, exposed {self.exposed_ms:.2f} ms"


@torch.inference_mode()
def record_prefill(bench: Bench) -> Recorded:
    """Record an eighth of the prefix as the suffix: about where loading and computing take equally long."""
    suffix = bench.prefix // 8
    timeline = Timeline(bench.platform, bench.device)
    stack = Stack(bench.shape, bench.prefix, suffix, bench.device)
    with bench.new_engine(bench.prefix + suffix, prompts=3, timeline=timeline) as measured:
        measured.fill()
        for _ in range(2):  # the second one counts
            prompt = measured.new_prompt()
            measured.keep(prompt[: bench.prefix])
            measured.platform.synchronize_device(measured.device)
            timeline.restart()
            _forward(measured, stack, prompt, timeline)
            measured.flush()
        spans = timeline.spans()
    hidden, exposed = hidden_and_exposed(spans)
    recorded = [RecordedSpan(span.lane, span.layer, span.start * 1e3, span.end * 1e3) for span in spans]
    return Recorded(bench.prefix, suffix, hidden * 1e3, exposed * 1e3, recorded)


def _forward(measured: MeasuredEngine, stack: Stack, prompt: Slots, timeline: Timeline) -> None:
    steps, prefix = LayerSteps(measured.engine), measured.num_tokens - len(stack.input)
    is_new = np.arange(measured.num_tokens) >= prefix
    load = Request(prompt[:prefix], measured.target[:prefix])
    steps.begin([load], [Request(prompt, measured.target, is_new)])
    steps.start_load_kv()
    x, stream = stack.input, measured.platform.current_stream(measured.device)
    for layer in range(measured.shape.num_layers):
        steps.wait_for_layer_load(layer)
        with timeline.span("compute", layer, stream):
            x = stack.mix(layer, stack.attend(layer, x, stack.project(layer, x)))
        steps.save_kv_layer(layer)
    steps.wait_for_save()
