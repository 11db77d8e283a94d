"""Loads: pages from host memory into a layer of the device, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from lwkv.connectors.lane import Lane
from lwkv.connectors.plan import Plan, Slice
from lwkv.paged_layer import PagedLayer
from lwkv.platforms import Event, Platform
from lwkv.platforms.protocol import Int64s
from lwkv.timeline import Timeline

Write = Callable[[PagedLayer, torch.Tensor, Slice], None]


@dataclass(slots=True, eq=False)
class Load:
    """One batch on its way to the device. `arrived[i]` is layer i's event, None until the layer is queued."""

    plan: Plan
    arrived: list[Event | None]


class Loader:
    """Queues loads on its lane; the host never waits for the device here."""

    def __init__(
        self,
        platform: Platform,
        device: torch.device,
        lane: Lane,
        timeline: Timeline,
    ) -> None:
        self._platform = platform
        self._device = device
        self._lane = lane
        self._timeline = timeline

    def begin(self, plan: Plan, num_layers: int) -> Load:
        """Start a batch: nothing of it is written before what the current stream holds now is done."""
        self._wait_for_readers()
        return Load(plan, [None] * num_layers)

    def queue(self, load: Load, layer: int, target: PagedLayer, pages: Int64s, write: Write) -> None:
        """Queue copy and kernel of one layer.

        Args:
            target: the layer written to.
            pages: int64 (chunks,), the host page of each chunk of the plan; they stay in use until `copied`.
            write: queues nothing itself; moves a slice from a staging buffer into `target` when it runs.
        """
        lane = self._lane
        recording = self._timeline.span("load", layer, lane.copies)
        copies = load.plan.copies(layer, target, pages)
        for part, batch in zip(load.plan.slices(target), copies, strict=True):
            buffer = lane.next_to_fill()
            self._platform.load_batch(buffer.memory, batch, lane.copies)
            lane.pass_on(buffer)
            self._platform.launch(lane.kernels, partial(write, target, buffer.memory, part))
            lane.take_back(buffer)
        recording.end(lane.kernels)
        load.arrived[layer] = self._mark()

    def wait(self, load: Load, layer: int) -> None:
        """Make the current stream wait until `layer`, which has been queued, has arrived."""
        event = load.arrived[layer]
        if event is None:
            raise RuntimeError(f"layer {layer} is waited for but was never queued")
        self._platform.wait_event(self._platform.current_stream(self._device), event)

    def end(self, load: Load) -> Callable[[], None]:
        """Return a blocking call that returns once no queued copy reads the batch's host pages any more."""
        event = self._platform.new_event(blocking=True)
        self._platform.record(event, self._lane.kernels)
        return partial(self._platform.synchronize_event, event)

    def _wait_for_readers(self) -> None:
        # Blocks about to be written may still be read, or zeroed, by what the engine queued before.
        self._platform.wait_stream(self._lane.kernels, self._platform.current_stream(self._device))

    def _mark(self) -> Event:
        event = self._platform.new_event()
        self._platform.record(event, self._lane.kernels)
        return event
