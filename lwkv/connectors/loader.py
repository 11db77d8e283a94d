"""Loads: pages from host memory into a layer of the device, one layer at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from lwkv.connectors.caches import Caches
from lwkv.connectors.lane import Lane, StagingBuffer
from lwkv.connectors.plan import Plan, Slice
from lwkv.kernels import Kernels
from lwkv.paged_layer import PagedLayer
from lwkv.platforms import CopyBatch, Event, Stream
from lwkv.platforms.protocol import Int64s
from lwkv.timeline import Recording, Timeline


@dataclass(slots=True, eq=False)
class Load:
    """One batch on its way to the device.

    Attributes:
        lane: what the batch is queued on, up to its end.
        arrived: layer i's event, None until the layer is queued.
        fetched: staging buffers with the first slices in order, whose copies were queued ahead, and the
            number of that fill: another one since, of whatever batch, has overwritten the slice.
        recordings: of the layers whose copies were queued ahead, by layer, until the layer is queued.
        stream: the current one of the batch's last step.
        not_waited_for: the event of the last layer that was queued, unless it has been waited for.
    """

    lane: Lane
    plan: Plan
    arrived: list[Event | None]
    fetched: deque[tuple[StagingBuffer, int]] = field(default_factory=deque)
    recordings: dict[int, Recording] = field(default_factory=dict)
    stream: Stream = None
    not_waited_for: Event | None = None


class Loader(Caches):
    """The loading side of a connector; the host never waits for the device here, but in `end_load`."""

    kernels: Kernels
    _timeline: Timeline

    def load_layer(self, load: Load, layer: int, pages: Int64s) -> None:
        """Queue one layer: pages are int64 (chunks,), in use until `end_load` has returned."""
        self._queue_load(load, layer, self.layers[layer], pages)

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
        load.lane.spare_events += [event for event in load.arrived if event is not None]
        load.arrived = [None] * len(load.arrived)

    def end_load(self, load: Load) -> None:
        """Block until the host pages of a batch that was left are no longer read; give its tables back."""
        if load.fetched:
            self._wait_for_fetched(load)
        self._synchronize(load.lane.kernels)
        load.plan.uploads.give_back()

    def _begin_load(self, load: Load, pages: Int64s | None) -> None:
        """Write nothing of a batch before what the current stream holds now is done.

        Where all pages are known, int64 (layers, chunks), the first copies are queued, as many as fit the
        staging: they need no more, and the host takes a while to prepare the rest.
        """
        if pages is not None:
            load.plan.know(pages)
            self._fetch_first(load, pages)
        load.stream = self.platform.current_stream(self.device)
        self._wait_for_readers(load)

    def _queue_load(self, load: Load, layer: int, target: PagedLayer, pages: Int64s) -> None:
        """Queue copy and kernel of one layer, which goes into `target`."""
        lane = load.lane
        recording = load.recordings.pop(layer, None) or self._record(lane, layer)
        for number, part in enumerate(load.plan.slices(target)):
            buffer = self._fetched(load) or self._fetch(lane, load.plan.copies(layer, target, pages)[number])
            lane.pass_on(buffer)
            if part.first_row < part.last_row:
                self.platform.launch(lane.kernels, self._writing(load, target, buffer.memory, part))
            lane.take_back(buffer)
        recording.end(lane.kernels)
        load.stream = self.platform.current_stream(self.device)
        event = lane.spare_events.pop() if lane.spare_events else self.platform.new_event()
        self.platform.record(event, lane.kernels)
        load.arrived[layer] = load.not_waited_for = event

    def _writing(
        self, load: Load, target: PagedLayer, staging: torch.Tensor, part: Slice
    ) -> Callable[[], object]:
        """The work that moves a slice, which has rows, from a staging buffer into `target`."""
        return partial(self.kernels.scatter, target, staging, part.rows)

    def _fetch_first(self, load: Load, pages: Int64s) -> None:
        for number, layer in enumerate(self.layers):
            room = len(load.lane.buffers) - len(load.fetched)
            if not room:
                return
            load.recordings[number] = self._record(load.lane, number)
            for batch in load.plan.copies(number, layer, pages[number])[:room]:
                buffer = self._fetch(load.lane, batch)
                load.fetched.append((buffer, buffer.fills))

    def _record(self, lane: Lane, layer: int) -> Recording:
        return self._timeline.span("load", layer, lane.copies)

    def _fetch(self, lane: Lane, batch: CopyBatch) -> StagingBuffer:
        buffer = lane.next_to_fill()
        self.platform.load_batch(buffer.memory, batch, lane.copies)
        # Marked here: by the time it is passed on, the copies of later layers may be queued behind it.
        lane.mark_filled(buffer)
        return buffer

    def _fetched(self, load: Load) -> StagingBuffer | None:
        """The staging with the slice whose turn it is, if it was fetched and nobody filled it since."""
        if not load.fetched:
            return None
        buffer, fill = load.fetched.popleft()
        return buffer if buffer.fills == fill else None

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
