"""Loads: pages from host memory into a layer of the device, one layer at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from lwkv.connectors.lane import Lane, StagingBuffer
from lwkv.connectors.plan import Plan, Slice
from lwkv.paged_layer import PagedLayer
from lwkv.platforms import CopyBatch, Event, Platform, Stream
from lwkv.platforms.protocol import Int64s
from lwkv.timeline import Recording, Timeline

Write = Callable[[PagedLayer, torch.Tensor, Slice], None]


@dataclass(slots=True, eq=False)
class Load:
    """One batch on its way to the device.

    Attributes:
        loader: what the batch is queued with, up to its end.
        arrived: layer i's event, None until the layer is queued.
        fetched: staging buffers with the first slices in order, whose copies were queued ahead, and the
            number of that fill: another one since, of whatever batch, has overwritten the slice.
        recordings: of the layers whose copies were queued ahead, by layer, until the layer is queued.
        stream: the current one of the batch's last step.
        not_waited_for: the event of the last layer that was queued, unless it has been waited for.
    """

    loader: Loader
    plan: Plan
    arrived: list[Event | None]
    fetched: deque[tuple[StagingBuffer, int]] = field(default_factory=deque)
    recordings: dict[int, Recording] = field(default_factory=dict)
    stream: Stream = None
    not_waited_for: Event | None = None


class Loader:
    """Queues loads on its lane; the host never waits for the device here, but in `end`."""

    def __init__(self, platform: Platform, device: torch.device, lane: Lane, timeline: Timeline) -> None:
        self._platform = platform
        self._device = device
        self._lane = lane
        self._timeline = timeline
        self._spare: list[Event] = []

    def begin(self, plan: Plan, layers: Sequence[PagedLayer], pages: Int64s | None) -> Load:
        """Start a batch: nothing of it is written before what the current stream holds now is done.

        Where all pages are known, int64 (layers, chunks), the first copies are queued, as many as fit the
        staging: they need no more, and the host takes a while to prepare the rest.
        """
        load = Load(self, plan, [None] * len(layers))
        if pages is not None:
            plan.know(layers, pages)
            self._fetch_first(load, layers, pages)
        load.stream = self._current()
        self._wait_for_readers(load.stream)
        return load

    def queue(self, load: Load, layer: int, target: PagedLayer, pages: Int64s, write: Write) -> None:
        """Queue copy and kernel of one layer.

        Args:
            target: the layer written to.
            pages: int64 (chunks,), the host page of each chunk of the plan, in use until what `end` gives
                has returned.
            write: queues nothing itself; moves a slice, which has rows, from a staging buffer into `target`
                when it runs.
        """
        lane = self._lane
        recording = load.recordings.pop(layer, None) or self._record(layer)
        for number, part in enumerate(load.plan.slices(target)):
            buffer = self._fetched(load) or self._fetch(load.plan.copies(layer, target, pages)[number])
            lane.pass_on(buffer)
            if part.first_row < part.last_row:
                self._platform.launch(lane.kernels, partial(write, target, buffer.memory, part))
            lane.take_back(buffer)
        recording.end(lane.kernels)
        load.stream = self._current()
        load.arrived[layer] = load.not_waited_for = self._mark()

    def wait(self, load: Load, layer: int) -> None:
        """Make the current stream wait until `layer`, which has been queued, has arrived."""
        event = load.arrived[layer]
        if event is None:
            raise RuntimeError(f"layer {layer} is waited for but was never queued")
        load.stream = self._current()
        self._let_wait(load.stream, event)
        if event is load.not_waited_for:
            load.not_waited_for = None

    def write_behind(self, stream: Stream) -> None:
        """Write nothing more before what `stream` holds now is done."""
        self._platform.wait_stream(self._lane.kernels, stream)

    def leave(self, load: Load) -> None:
        """Let the batch's last stream, and the current one, go on once all queued layers are there.

        The batch cannot be waited for any more: its events serve the next one.
        """
        event, load.not_waited_for = load.not_waited_for, None
        if event is not None:
            self._let_wait(load.stream, event)
            current = self._current()
            if current != load.stream:
                self._let_wait(current, event)
        self._spare += [event for event in load.arrived if event is not None]
        load.arrived = [None] * len(load.arrived)

    def end(self, load: Load) -> None:
        """Block until no queued copy reads the batch's host pages any more."""
        if load.fetched:
            self._wait_for_fetched()
        self._synchronize(self._lane.kernels)

    def _fetch_first(self, load: Load, layers: Sequence[PagedLayer], pages: Int64s) -> None:
        for number, layer in enumerate(layers):
            room = self._lane.num_buffers - len(load.fetched)
            if not room:
                return
            load.recordings[number] = self._record(number)
            for batch in load.plan.copies(number, layer, pages[number])[:room]:
                buffer = self._fetch(batch)
                load.fetched.append((buffer, buffer.fills))

    def _record(self, layer: int) -> Recording:
        return self._timeline.span("load", layer, self._lane.copies)

    def _fetch(self, batch: CopyBatch) -> StagingBuffer:
        buffer = self._lane.next_to_fill()
        self._platform.load_batch(buffer.memory, batch, self._lane.copies)
        # Marked here: by the time it is passed on, the copies of later layers may be queued behind it.
        self._lane.mark_filled(buffer)
        return buffer

    def _fetched(self, load: Load) -> StagingBuffer | None:
        """The staging with the slice whose turn it is, if it was fetched and nobody filled it since."""
        if not load.fetched:
            return None
        buffer, fill = load.fetched.popleft()
        return buffer if buffer.fills == fill else None

    def _current(self) -> Stream:
        return self._platform.current_stream(self._device)

    def _let_wait(self, stream: Stream, event: Event) -> None:
        self._platform.wait_event(stream, event)

    def _wait_for_readers(self, current: Stream) -> None:
        # Blocks about to be written may still be read, or zeroed, by what the engine queued before.
        self.write_behind(current)

    def _wait_for_fetched(self) -> None:
        # No kernel waits for copies that were queued ahead and whose layers never were.
        self._synchronize(self._lane.copies)

    def _synchronize(self, stream: Stream) -> None:
        event = self._platform.new_event(blocking=True)
        self._platform.record(event, stream)
        self._platform.synchronize_event(event)

    def _mark(self) -> Event:
        event = self._spare.pop() if self._spare else self._platform.new_event()
        self._platform.record(event, self._lane.kernels)
        return event
