"""A forward pass with an engine's hooks around each layer, and what the hooks cost the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from lwkv.benchmarks.prefills.stack import Stack
from lwkv.steps import LayerSteps


@dataclass(slots=True)
class HostTimes:
    """Seconds the host spent in the hooks, call by call."""

    waits: list[float] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)


def prefill(stack: Stack, steps: LayerSteps | None = None, hosts: HostTimes | None = None) -> torch.Tensor:
    """Queue the layers of `stack`, with the hooks of `steps` if given; returns what the last one yields."""
    hosts, x = hosts or HostTimes(), stack.input
    for layer in range(stack.shape.num_layers):
        # As in vLLM: keys and values of the new tokens first, then the wait, then attention.
        q = stack.project(layer, x)
        if steps is not None:
            with timed(hosts.waits):
                steps.wait_for_layer_load(layer)
        x = stack.attend(layer, x, q)
        if steps is not None:
            with timed(hosts.saves):
                steps.save_kv_layer(layer)
        x = stack.mix(layer, x)
    return x


@contextmanager
def timed(times: list[float]) -> Iterator[None]:
    """Append the host's seconds in the block."""
    start = time.perf_counter()
    yield
    times.append(time.perf_counter() - start)


def median_host_ms(seconds: list[float]) -> float:
    """The median, in milliseconds."""
    return statistics.median(seconds) * 1e3


def layer_host_ms(seconds: list[float], num_layers: int) -> float:
    """Milliseconds a layer: the mean over a run's layers, of which some calls do the work of several.

    `seconds` are of whole runs, layer by layer; of all runs it is the median.
    """
    runs = [seconds[i : i + num_layers] for i in range(0, len(seconds), num_layers)]
    return statistics.median(map(statistics.mean, runs)) * 1e3
