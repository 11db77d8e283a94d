"""Saves: a layer of the device into pages of host memory, one layer at a time."""

from __future__ import annotations

from dataclasses import dataclass

from lwkv.connectors.lane import Lane, StagingBuffer
from lwkv.connectors.transfer_plan import Plan
from lwkv.layouts.registered_caches import Caches
from lwkv.platforms import Event, Int64s, Stream
from lwkv.telemetry.timeline import Timeline


@dataclass(slots=True, eq=False)
class Save:
    """One batch on its way to host memory.

    Attributes:
        lane: what the batch is queued on, up to its end.
        pages: where it goes, int64 (layers, chunks).
        group: how many layers are queued one right after the other.
        sync: whether they are queued behind what the current stream holds when the last of them is computed.
        stream: the current one of the batch's last step, None before any layer is computed.
        waiting: layers that are computed and not queued yet.
        last: the staging buffer that was filled last: when it is, all blocks queued so far have been read.
        before_last: behind all copies but the last one; None as long as there is one copy or none.
    """

    lane: Lane
    plan: Plan
    pages: Int64s
    group: int = 1
    sync: bool = True
    stream: Stream = None
    waiting: range = range(0)
    last: StagingBuffer | None = None
    before_last: Event | None = None


class Saver(Caches):
    """The saving side of a connector; the host never waits for the device here, but in `end_save`, and before
    staging is filled again where an event does not cover copies to the host."""

    _timeline: Timeline

    def save_layer(self, save: Save, layer: int) -> None:
        """Save a layer that the current stream has been told to compute.

        It is queued when its group is full, at the latest in `finish_save`: a model's own code makes ours
        slow in between, and queued in a row, several layers take little more than one. Its rows must not
        change before the call that `leave_save` orders.
        """
        current = self.platform.current_stream(self.device)
        if save.waiting and (current != save.stream or layer != save.waiting.stop):
            self.finish_save(save)
        save.stream = current
        save.waiting = range(save.waiting.start if save.waiting else layer, layer + 1)
        if len(save.waiting) >= save.group:
            self.finish_save(save)

    def finish_save(self, save: Save) -> None:
        """Queue kernels and copies of all layers that wait, behind what the stream of the last one holds."""
        waiting, save.waiting = save.waiting, range(0)
        if waiting and save.sync:
            self._wait_for_writers(save)
        for start in range(0, len(waiting), save.plan.together):
            self._queue_save(save, waiting[start : start + save.plan.together])

    def leave_save(self, save: Save) -> None:
        """Queue nothing more of a batch: what comes next may write to its blocks. As for `leave_load`.

        What was not queued is not saved.
        """
        save.waiting = range(0)
        if save.last is not None:
            self.platform.wait_event(save.stream, save.last.filled)
            current = self.platform.current_stream(self.device)
            if current != save.stream:
                self.platform.wait_event(current, save.last.filled)

    def end_save(self, save: Save) -> None:
        """Block until all bytes of a batch that was left are in its host pages; give its tables back."""
        self._wait_for_copies(save)
        save.plan.uploads.give_back()

    def _queue_save(self, save: Save, layers: range) -> None:
        """Queue layers that share a staging buffer."""
        lane, pages = save.lane, save.pages[layers.start]
        sources = self.layers[layers.start : layers.stop]
        recordings = [self._timeline.span("save", layer, lane.kernels) for layer in layers]
        for number, part in enumerate(save.plan.slices(sources[0])):
            batch, buffer = save.plan.copy(layers, number, sources[0], pages), lane.next_to_fill()
            lane.move(save.plan.sharing(sources, buffer.memory, part.rows))
            lane.mark_filled(buffer)
            self._mark_before(save)
            save.last = buffer
            lane.pass_on(buffer)
            self.platform.save_batch(buffer.memory, batch, lane.copies)
            lane.take_back(buffer)
        for recording in recordings:
            recording.end(lane.copies)

    def _mark_before(self, save: Save) -> None:
        """Record that all copies queued so far are done. The event is this batch's own: see `Lane`."""
        if save.last is not None:
            save.before_last = save.before_last or self.platform.new_event(blocking=True)
            self.platform.record(save.before_last, save.lane.copies)

    def _wait_for_writers(self, save: Save) -> None:
        self.platform.wait_stream(save.lane.kernels, save.stream)

    def _wait_for_copies(self, save: Save) -> None:
        if save.before_last is not None:
            # A thread that sleeps until an event wakes up late: it sleeps until the last copy but one.
            self.platform.synchronize_event(save.before_last)
        event = self.platform.new_event(blocking=save.before_last is None)
        self.platform.record(event, save.lane.copies)
        self.platform.d2h_fence(save.lane.copies, event)
