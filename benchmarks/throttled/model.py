"""Models that take a given time for a layer, and do nothing else."""

from __future__ import annotations

import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch

from lwkv.benchmarks.measuring.timing import Work, median_ms
from lwkv.benchmarks.prefills.prefill import timed
from lwkv.platforms import Event, Platform

# A matrix of float32 whose square takes a large device less than a millisecond.
SIDE = 2048
TRIED = 8


class Model(Protocol):
    """A layer takes what the model was made for, or as long as its sleep really lasted."""

    where: str

    def running(self) -> AbstractContextManager[None]:
        """Where its layers are computed, and the hooks around them come."""

    def compute(self) -> None:
        """Compute a layer, behind what the current stream waits for."""

    def layer_ms(self) -> float:
        """The mean of the layers since it was asked last; all of them must have ended."""


class StreamModel:
    """Computes on a stream of its own, which is the current one: the host runs ahead, as with a device.

    Needs a platform with `features.event_timing`.
    """

    where = "stream"

    def __init__(self, platform: Platform, device: torch.device, seconds: float) -> None:
        self._platform = platform
        self._stream = platform.new_stream(device)
        on_host = platform.device_type == "cpu"
        self._work = partial(time.sleep, seconds) if on_host else products(platform, device, seconds)
        self._layers: list[tuple[Event, Event]] = []

    def running(self) -> AbstractContextManager[None]:
        return self._platform.use_stream(self._stream)

    def compute(self) -> None:
        platform, stream = self._platform, self._stream
        start, end = platform.new_event(timing=True), platform.new_event(timing=True)
        platform.record(start, stream)
        platform.launch(stream, self._work)
        platform.record(end, stream)
        self._layers.append((start, end))

    def layer_ms(self) -> float:
        layers, self._layers = self._layers, []
        return statistics.fmean(self._platform.elapsed_ms(*events) or 0.0 for events in layers)


class HostModel:
    """Computes on the host's thread, as engines on the CPU do: there the host waits for each layer."""

    where = "host"

    def __init__(self, platform: Platform, device: torch.device, seconds: float) -> None:
        self._platform, self._device, self._seconds = platform, device, seconds
        self._layers: list[float] = []

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def compute(self) -> None:
        self._platform.synchronize_stream(self._platform.current_stream(self._device))
        with timed(self._layers):
            time.sleep(self._seconds)

    def layer_ms(self) -> float:
        layers, self._layers = self._layers, []
        return statistics.fmean(layers) * 1e3


def products(platform: Platform, device: torch.device, seconds: float) -> Work:
    """Work that keeps the device busy for about as long, once it is queued: no device type has a sleep."""
    matrix = torch.zeros(SIDE, SIDE, device=device)
    product = torch.empty_like(matrix)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix, out=product)

    tried_ms = median_ms(platform, device, partial(multiply, TRIED))
    return partial(multiply, max(1, round(TRIED * seconds * 1e3 / tried_ms)))
