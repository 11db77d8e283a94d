"""Loads: pages from host memory into a layer of the device, one layer at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from lwkv.codecs.page_codec import PagedCoder
from lwkv.connectors.lane import Lane, StagingBuffer
from lwkv.connectors.transfer_plan import FIRST_LAYERS, Plans, Slice, TransferPlan
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import Event, Int64s, Stream
from lwkv.telemetry.timeline import Recording, Timeline
from lwkv.transfer import Transfer

MOST_COPIES = 128
MORE_LAYERS = 3
"""How many more layers ahead are queued with each layer than with the one before."""
FIRST_BUFFERS = 4
"""Staging buffers that are filled and emptied before the model is launched, for layers that are all known.

Meanwhile the engine prepares the batch, for some milliseconds, in which the link would have nothing to do.
"""


@dataclass(slots=True, eq=False)
class Load:
    """One batch on its way to the device.

    Attributes:
        lane: what the batch is queued on, up to its end.
        arrived: layer i's event, None until the layer is queued.
        prefilled: buffers that were filled ahead, in order; another batch may have filled them anew.
        recordings: of the layers whose copies are queued, by layer, until their kernels are.
        stream: the current one of the batch's last step.
        is_plain: whether each staging buffer takes a copy and a kernel, on one stream: see PagedLoader.
        is_ordered: whether kernels wait for whoever used the blocks before.
        let_wait: makes a stream wait for these; None for what the current stream holds.
        not_waited_for: the event of the last layer that was queued, unless it has been waited for.
        waited_for: the event that was waited for last, and the stream that waits.
    """

    lane: Lane
    plan: TransferPlan
    arrived: list[Event | None]
    prefilled: deque[StagingBuffer] = field(default_factory=deque)
    recordings: dict[int, Recording] = field(default_factory=dict)
    stream: Stream = None
    is_plain: bool = False
    is_ordered: bool = False
    let_wait: Callable[[Stream], object] | None = None
    not_waited_for: Event | None = None
    waited_for: tuple[Event, Stream] | None = None


LoadT = TypeVar("LoadT", bound=Load)


class Loader(ABC, Generic[LoadT]):
    """The loading side of a connector; the host never waits for the device here, but in `end_load`.

    Each kind of load has a loader of its own: give a load only to the loader that began it.

    Args:
        lookahead_layers: layers that are queued before the model asks for them, where they come from lower
            tiers; with 0 none, also where they are in host memory.
    """

    def __init__(self, plans: Plans, lane: Lane, timeline: Timeline, lookahead_layers: int) -> None:
        self.lane = lane
        self._plans = plans
        self._platform, self._device, self._layers = plans.platform, plans.device, plans.layers
        self._num_layers = len(plans.layers)
        self._timeline = timeline
        self._lookahead_layers = lookahead_layers
        self._cuts: dict[tuple[int, int], list[range]] = {}

    @abstractmethod
    def begin_load(self, transfer: Transfer, pages: Int64s | None = None) -> LoadT:
        """Start a batch of loads; nothing is written to the slots of `transfer` before a layer is queued.

        What is written comes behind what the current stream holds when the first layer is queued.

        Give the pages, int64 (layers, chunks), where all are known: the first copies are then queued at once.
        """

    def come_behind(self, load: LoadT, let_wait: Callable[[Stream], object]) -> None:
        """Have what a load writes that has just begun come behind what `let_wait` makes a stream wait for.

        That takes the place of what the current stream holds when the first layer is queued.
        """
        load.let_wait = let_wait
        if not load.is_plain:  # else once the first copy is on its way
            self._order(load)

    def layers_ahead(self, load: LoadT, layer: int, known: bool) -> int:
        """How many layers behind `layer` are queued with it; `known` where all pages are in host memory.

        The first copies are under way when the model is to be launched, which must not be kept waiting. Where
        all are known, a few more than were computed each time, until enough are queued: the model's own code
        makes ours slow, and several in a row take little more than one. Not many at once: the model, and the
        saves of the same step, would wait for the host. A driver whose queue is full makes it wait, too.
        """
        if not (known and self._lookahead_layers):
            return self._lookahead_layers if layer >= FIRST_LAYERS else 0
        return min(MORE_LAYERS * layer, max(8, MOST_COPIES // max(load.plan.num_slices, 1)) - 1)

    def layers_at_first(self, load: LoadT) -> int:
        """How many layers, all of whose pages are known, are queued before the model is launched."""
        layers = self._layers_from(load, 0).stop
        if self._lookahead_layers:
            for _ in range(1, FIRST_BUFFERS // max(load.plan.num_slices, 1)):
                if layers < self._num_layers:
                    layers = self._layers_from(load, layers).stop
        return layers

    def load_layer(self, load: LoadT, layer: int, pages: Int64s) -> None:
        """Queue all that brings a layer from its pages to its place on the device: copies, kernels, an event.

        Copies that were queued ahead are used. Layers behind it that share its staging buffer come with it; a
        layer that came so is not queued again. `pages` are int64 (chunks,), in use until `end_load` has
        returned; where `begin_load` was given all pages, those are used instead.
        """
        if load.arrived[layer] is not None:
            return
        lane, load.stream = load.lane, self._platform.current_stream(self._device)
        if not load.is_ordered:
            self._order(load)
        layers = self._layers_from(load, layer)
        targets = self._targets(load, layers)
        for number, piece in enumerate(load.plan.slices(targets[0])):
            buffer = load.prefilled.popleft() if load.prefilled else None
            if buffer is None or buffer.holds != (load.plan, layers, number):
                buffer = self._fill(load, layers, number, targets[0], pages)
            lane.pass_on(buffer)
            if piece.first_row < piece.last_row:
                if load.plan.is_coded:
                    self._unload_coded(load, layers, targets, buffer.memory, number, piece, pages)
                else:
                    self._scatter(load, targets, buffer.memory, piece)
            lane.take_back(buffer)
        self._mark_arrived(load, layers)

    def load_layers(self, load: LoadT, layers: range, pages: Int64s) -> None:
        """Queue several layers of a load that was given all pages, in a row, as `load_layer` does each.

        `pages` are int64 (layers, chunks), of all layers.
        """
        for layer in layers:
            self.load_layer(load, layer, pages[layer])

    def drop_chunks(self, load: LoadT, kept: npt.NDArray[np.bool_]) -> None:
        """Leave the chunks that are False, bool (chunks,), out of the layers still to be queued."""
        load.plan, load.is_plain = load.plan.only(kept), False
        if load.plan.transfer.device_slots is not None:
            # The current stream makes those that are left: kernels have to wait for it once more.
            load.is_ordered = False

    def wait_layer(self, load: LoadT, layer: int, stream: Stream = None) -> None:
        """Make the current stream, which is `stream` if that is given, wait for a layer that was queued."""
        event = load.arrived[layer]
        if event is None:
            raise RuntimeError(f"layer {layer} is waited for but was never queued")
        load.stream = stream or self._platform.current_stream(self._device)
        waited_for = event, load.stream
        if waited_for == load.waited_for:
            return  # layers that came together have one event
        self._let_wait(load.stream, event)
        load.waited_for = waited_for
        if event is load.not_waited_for:
            load.not_waited_for = None

    def take_arrival(self, load: LoadT) -> Event:
        """Record an event behind all that was queued of a load, for the caller to query or to wait for.

        `leave_load` then makes no stream wait.
        """
        arrival = self._platform.new_event()
        self._platform.record(arrival, load.lane.kernels)
        load.not_waited_for = None
        return arrival

    def leave_load(self, load: LoadT) -> None:
        """Queue nothing more of a batch, nor wait for it: what comes next may write to its blocks.

        That is the work of the stream which was current in the batch's last step, and of the current one.
        Takes no lock: a finalizer may call it on any thread.
        """
        event, load.not_waited_for = load.not_waited_for, None
        if event is not None:
            self._let_wait(load.stream, event)
            current = self._platform.current_stream(self._device)
            if current != load.stream:
                self._let_wait(current, event)
        # Layers that came together have one event.
        arrived = {id(event): event for event in load.arrived if event is not None}
        load.lane.spare_events += arrived.values()
        load.arrived = [None] * len(load.arrived)

    def end_load(self, load: LoadT) -> None:
        """Block until the host pages of a batch that was left are no longer read; give its tables back."""
        if load.prefilled:
            self._wait_for_prefilled(load)
        self._synchronize(load.lane.kernels)
        load.plan.uploads.give_back()

    def _targets(self, load: LoadT, layers: range) -> Sequence[PagedLayer]:
        """Where the rows of `layers`, which share staging, go."""
        return self._layers[layers.start : layers.stop]

    def _unload_coded(
        self,
        load: LoadT,
        layers: range,
        targets: Sequence[PagedLayer],
        staging: torch.Tensor,
        number: int,
        piece: Slice,
        pages: Int64s,
    ) -> None:
        """Queue what turns coded pages in `staging`, those of slice `number`, into rows of `targets`."""
        coder = self._coder_in_cache(load, layers, number, pages)
        if coder is not None:
            work = partial(coder.decode, targets, piece.rows.slots, staging, load.plan.num_pages(number))
            load.lane.code_in_cache(coder, work)
        else:
            self._decode(load, layers, targets, staging, number, pages)
            self._scatter(load, targets, load.lane.raw_pages, piece)

    def _coder_in_cache(self, load: LoadT, layers: range, number: int, pages: Int64s) -> PagedCoder | None:
        """What decodes slice `number` of `layers` into the cache; None where raw pages are needed."""
        return None

    def _scatter(
        self, load: LoadT, targets: Sequence[PagedLayer], staging: torch.Tensor, piece: Slice
    ) -> None:
        """Queue what turns raw pages in `staging` into rows of `targets`, for a slice that has rows."""
        load.lane.move(load.plan.staged(targets, staging, piece.rows))

    def _decode(
        self,
        load: LoadT,
        layers: range,
        targets: Sequence[PagedLayer],
        staging: torch.Tensor,
        number: int,
        pages: Int64s,
    ) -> None:
        """Queue what makes raw pages of slice `number`; those that could not be coded come as they are."""
        lane, plan = load.lane, load.plan
        lane.decode(staging, plan.coding(targets, number))
        for place, layer in enumerate(layers):
            batch = plan.spill_copies(targets[place], place, number, plan.pages_of(layer, pages))
            if batch is not None:
                self._platform.load_batch(lane.raw_pages, batch, lane.kernels)

    def _fill_ahead(self, load: LoadT, pages: Int64s) -> None:
        """Queue as many copies as the lane allows; `pages` are int64 (layers, chunks).

        They need nothing else, and the host takes a while to prepare the rest.
        """
        layer = 0
        while layer < self._num_layers:
            layers, target = self._layers_from(load, layer), self._layers[layer]
            for number in range(load.plan.num_slices):
                if len(load.prefilled) == load.lane.most_prefilled:
                    return
                load.prefilled.append(self._fill(load, layers, number, target, pages[layer]))
            layer = layers.stop

    def _fill(
        self, load: LoadT, layers: range, number: int, target: PagedLayer, pages: Int64s
    ) -> StagingBuffer:
        """Queue the copies of slice `number` of `layers` into the next staging buffer; return it.

        The copies stream waits until the buffer is empty, and records the event of a full one behind them.
        """
        lane = load.lane
        if self._timeline.is_on:
            self._begin_recordings(load, layers)
        batch, buffer = load.plan.copy(layers, number, target, pages), lane.next_to_fill()
        self._platform.load_batch(buffer.memory, batch, lane.copies)
        # Marked here: by the time it is passed on, the copies of later layers may be queued behind it.
        lane.mark_filled(buffer)
        buffer.holds = load.plan, layers, number
        return buffer

    def _begin_recordings(self, load: LoadT, layers: range) -> None:
        for layer in layers:
            if layer not in load.recordings:
                load.recordings[layer] = self._timeline.span("load", layer, load.lane.copies)

    def _mark_arrived(self, load: LoadT, layers: range) -> None:
        """Let whoever waits for `layers` go on behind what the kernels stream holds now."""
        lane = load.lane
        event = lane.spare_events.pop() if lane.spare_events else self._platform.new_event()
        self._platform.record(event, lane.kernels)
        if load.recordings:
            for layer in layers:
                if layer in load.recordings:
                    load.recordings.pop(layer).end(lane.kernels)
        load.not_waited_for = event
        load.arrived[layers.start : layers.stop] = [event] * len(layers)

    def _layers_from(self, load: LoadT, layer: int) -> range:
        """The layers from `layer` on that share staging: few at the beginning and at the end.

        They arrive together. A model that takes at least as long to compute a layer as the link to bring one
        is ahead by more layers the later it is; one that takes less has the last ones left to compute.
        """
        return self._cut(load)[layer]

    def _cut(self, load: LoadT) -> list[range]:
        """For each layer those that `_layers_from` gives; made once for each number that share a buffer."""
        most = load.plan.layers_per_buffer
        least = load.lane.least_bytes // max(load.plan.layer_bytes, 1)
        cut = self._cuts.get((most, least))
        if cut is None:
            cuts = [self._share(most, least, first) for first in range(self._num_layers)]
            cut = self._cuts[most, least] = cuts
        return cut

    def _share(self, most: int, least: int, layer: int) -> range:
        """The layers from `layer` on that share a staging buffer which has room for `most`, if there are so
        many `least` of them."""
        left = self._num_layers - layer
        wanted = max(least, min(1 + layer // 2, (left + 1) // 3))
        return range(layer, layer + max(1, min(most, wanted, left)))

    def _let_wait(self, stream: Stream, event: Event) -> None:
        self._platform.wait_event(stream, event)

    def _order(self, load: LoadT) -> None:
        """Have the kernels of a load wait for whoever used the blocks before."""
        if load.let_wait is None:
            self._wait_for_readers(load)
        else:
            load.let_wait(load.lane.kernels)
        # Slots that are put together anew are the current stream's.
        load.let_wait, load.is_ordered = None, True

    def _wait_for_readers(self, load: LoadT) -> None:
        # Blocks about to be written may still be read, or zeroed, by what the engine queued before.
        self._platform.wait_stream(load.lane.kernels, load.stream)

    def _wait_for_prefilled(self, load: LoadT) -> None:
        # No kernel waits for copies that were queued ahead and whose layers never were.
        self._synchronize(load.lane.copies)

    def _synchronize(self, stream: Stream) -> None:
        event = self._platform.new_event(blocking=True)
        self._platform.record(event, stream)
        self._platform.synchronize_event(event)
