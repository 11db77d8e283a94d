"""Loads: pages from host memory into a layer of the device, one layer at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from lwkv.connectors.lane import Lane, StagingBuffer
from lwkv.connectors.transfer_plan import Plan, Slice
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.layouts.registered_caches import Caches
from lwkv.platforms import Event, Int64s, Stream
from lwkv.telemetry.timeline import Recording, Timeline


@dataclass(slots=True, eq=False)
class Load:
    """One batch on its way to the device.

    Attributes:
        lane: what the batch is queued on, up to its end.
        arrived: layer i's event, None until the layer is queued.
        fetched: buffers that were filled ahead, in order; another batch may have filled them anew.
        recordings: of the layers whose copies are queued, by layer, until their kernels are.
        stream: the current one of the batch's last step.
        is_ordered: whether kernels wait for whoever used the blocks before.
        not_waited_for: the event of the last layer that was queued, unless it has been waited for.
    """

    lane: Lane
    plan: Plan
    arrived: list[Event | None]
    fetched: deque[StagingBuffer] = field(default_factory=deque)
    recordings: dict[int, Recording] = field(default_factory=dict)
    stream: Stream = None
    is_ordered: bool = False
    not_waited_for: Event | None = None


class Loader(Caches):
    """The loading side of a connector; the host never waits for the device here, but in `end_load`."""

    _timeline: Timeline

    def load_layer(self, load: Load, layer: int, pages: Int64s) -> None:
        """Queue one layer, unless it was queued with one before: those that share staging come by one kernel.

        `pages` are int64 (chunks,), in use until `end_load` has returned; those given to `begin_load` count.
        """
        if load.arrived[layer] is None:
            layers = self._together(load, layer)
            self._queue_load(load, layers, self.layers[layers.start : layers.stop], pages)

    def drop_chunks(self, load: Load, kept: npt.NDArray[np.bool_]) -> None:
        """Leave the chunks that are False, bool (chunks,), out of the layers still to be queued."""
        load.plan = load.plan.only(kept)

    def wait_layer(self, load: Load, layer: int) -> None:
        """Make the current stream wait for a layer that has been queued."""
        event = load.arrived[layer]
        if event is None:
            raise RuntimeError(f"layer {layer} is waited for but was never queued")
        load.stream = self.platform.current_stream(self.device)
        self._let_wait(load.stream, event)
        if event is load.not_waited_for:
            load.not_waited_for = None

    def leave_load(self, load: Load) -> None:
        """Queue nothing more of a batch, nor wait for it: what comes next may write to its blocks.

        That is the work of the stream which was current in the batch's last step, and of the current one.
        Takes no lock: a finalizer may call it on any thread.
        """
        event, load.not_waited_for = load.not_waited_for, None
        if event is not None:
            self._let_wait(load.stream, event)
            current = self.platform.current_stream(self.device)
            if current != load.stream:
                self._let_wait(current, event)
        # Layers that came together have one event.
        arrived = {id(event): event for event in load.arrived if event is not None}
        load.lane.spare_events += arrived.values()
        load.arrived = [None] * len(load.arrived)

    def end_load(self, load: Load) -> None:
        """Block until the host pages of a batch that was left are no longer read; give its tables back."""
        if load.fetched:
            self._wait_for_fetched(load)
        self._synchronize(load.lane.kernels)
        load.plan.uploads.give_back()

    def _queue_load(self, load: Load, layers: range, targets: Sequence[PagedLayer], pages: Int64s) -> None:
        """Queue copy and kernel of layers that share their staging, and go into `targets`."""
        lane, load.stream = load.lane, self.platform.current_stream(self.device)
        if not load.is_ordered:
            self._wait_for_readers(load)
            load.is_ordered = True
        for number, part in enumerate(load.plan.slices(targets[0])):
            buffer = load.fetched.popleft() if load.fetched else None
            if buffer is None or buffer.holds != (load.plan, layers, number):
                buffer = self._fetch(load, layers, number, targets[0], pages)
            lane.pass_on(buffer)
            if part.first_row < part.last_row:
                self._write(load, targets, buffer.memory, part)
            lane.take_back(buffer)
        event = lane.spare_events.pop() if lane.spare_events else self.platform.new_event()
        self.platform.record(event, lane.kernels)
        for layer in layers:
            if layer in load.recordings:
                load.recordings.pop(layer).end(lane.kernels)
        load.not_waited_for = event
        load.arrived[layers.start : layers.stop] = [event] * len(layers)

    def _write(self, load: Load, targets: Sequence[PagedLayer], staging: torch.Tensor, part: Slice) -> None:
        """Queue what moves a slice, which has rows, from a staging buffer into `targets`."""
        load.lane.move(load.plan.sharing(targets, staging, part.rows))

    def _fetch_first(self, load: Load, pages: Int64s) -> None:
        """Queue as many copies as there are staging buffers; `pages` are int64 (layers, chunks).

        They need nothing else, and the host takes a while to prepare the rest.
        """
        layer = 0
        while layer < self.num_layers:
            layers, target = self._together(load, layer), self.layers[layer]
            for number in range(load.plan.num_slices):
                if len(load.fetched) == len(load.lane.buffers):
                    return
                load.fetched.append(self._fetch(load, layers, number, target, pages[layer]))
            layer = layers.stop

    def _fetch(
        self, load: Load, layers: range, number: int, target: PagedLayer, pages: Int64s
    ) -> StagingBuffer:
        """Queue the copies of slice `number` of the layers into the buffer that it returns."""
        lane = load.lane
        for layer in layers:
            if layer not in load.recordings:
                load.recordings[layer] = self._timeline.span("load", layer, lane.copies)
        batch, buffer = load.plan.copy(layers, number, target, pages), lane.next_to_fill()
        self.platform.load_batch(buffer.memory, batch, lane.copies)
        # Marked here: by the time it is passed on, the copies of later layers may be queued behind it.
        lane.mark_filled(buffer)
        buffer.holds = load.plan, layers, number
        return buffer

    def _together(self, load: Load, layer: int) -> range:
        """The layers from `layer` on that share staging: few at the beginning and at the end.

        They arrive together. A model that takes at least as long to compute a layer as the link to bring one
        is ahead by more layers the later it is; one that takes less has the last ones left to compute.
        """
        most = min(load.plan.together, 1 + layer // 2, (self.num_layers - layer + 1) // 3)
        return range(layer, layer + max(1, most))

    def _let_wait(self, stream: Stream, event: Event) -> None:
        self.platform.wait_event(stream, event)

    def _wait_for_readers(self, load: Load) -> None:
        # Blocks about to be written may still be read, or zeroed, by what the engine queued before.
        self.platform.wait_stream(load.lane.kernels, load.stream)

    def _wait_for_fetched(self, load: Load) -> None:
        # No kernel waits for copies that were queued ahead and whose layers never were.
        self._synchronize(load.lane.copies)

    def _synchronize(self, stream: Stream) -> None:
        event = self.platform.new_event(blocking=True)
        self.platform.record(event, stream)
        self.platform.synchronize_event(event)
