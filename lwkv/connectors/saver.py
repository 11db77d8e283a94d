"""Saves: a layer of the device into pages of host memory, one layer at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from lwkv.connectors.lane import Lane, StagingBuffer
from lwkv.connectors.plan import Plan
from lwkv.kernels import Kernels
from lwkv.paged_layer import PagedLayer
from lwkv.platforms import Platform, Stream
from lwkv.platforms.protocol import Int64s
from lwkv.timeline import Timeline


@dataclass(slots=True, eq=False)
class Save:
    """One batch on its way to host memory.

    Attributes:
        saver: what the batch is queued with, up to its end.
        group: how many layers are queued together.
        sync: whether they are queued behind what the current stream holds when the last of them is computed.
        stream: the current one of the batch's last step, None before any layer is computed.
        waiting: layers that are computed and not queued yet: number, layer, and the pages it goes to.
        last: the staging buffer that was filled last: when it is, all blocks queued so far have been read.
        before: the one filled before it.
    """

    saver: Saver
    plan: Plan
    group: int = 1
    sync: bool = True
    stream: Stream = None
    waiting: list[tuple[int, PagedLayer, Int64s]] = field(default_factory=list)
    last: StagingBuffer | None = None
    before: StagingBuffer | None = None


class Saver:
    """Queues saves on its lane; the host never waits for the device here, but in `end`."""

    def __init__(
        self,
        platform: Platform,
        device: torch.device,
        lane: Lane,
        kernels: Kernels,
        timeline: Timeline,
    ) -> None:
        self._platform = platform
        self._device = device
        self._lane = lane
        self._kernels = kernels
        self._timeline = timeline

    def add(self, save: Save, layer: int, source: PagedLayer, pages: Int64s) -> None:
        """Take a layer that the current stream has been told to compute; queue its group if that is full.

        A model's own code makes ours slow in between: queued in a row, several layers take little more than
        one.

        Args:
            source: the layer read; its rows must not change before the call that `release_blocks` orders.
            pages: int64 (chunks,), the host page of each chunk of the plan.
        """
        current = self._platform.current_stream(self._device)
        if save.waiting and current != save.stream:
            self.queue(save)
        save.stream = current
        save.waiting.append((layer, source, pages))
        if len(save.waiting) >= save.group:
            self.queue(save)

    def queue(self, save: Save) -> None:
        """Queue kernels and copies of all layers that wait, behind what the stream of the last one holds."""
        waiting, save.waiting = save.waiting, []
        if waiting and save.sync:
            self._wait_for_writers(save.stream)
        for layer, source, pages in waiting:
            self._queue(save, layer, source, pages)

    def release_blocks(self, save: Save) -> None:
        """Let blocks change once they have been read.

        The batch's last stream waits for that, and so does the current one. What was not queued is not saved.
        """
        save.waiting.clear()
        if save.last is not None:
            self._platform.wait_event(save.stream, save.last.filled)
            current = self._platform.current_stream(self._device)
            if current != save.stream:
                self._platform.wait_event(current, save.last.filled)

    def end(self, save: Save) -> None:
        """Block until every byte queued so far is in its host page."""
        if save.before is not None:
            # A thread that sleeps until an event wakes up late: it sleeps until the last copy but one.
            self._platform.synchronize_event(save.before.emptied)
        event = self._platform.new_event(blocking=save.before is None)
        self._platform.record(event, self._lane.copies)
        self._platform.d2h_fence(self._lane.copies, event)

    def _queue(self, save: Save, layer: int, source: PagedLayer, pages: Int64s) -> None:
        lane = self._lane
        recording = self._timeline.span("save", layer, lane.kernels)
        copies = save.plan.copies(layer, source, pages)
        for part, batch in zip(save.plan.slices(source), copies, strict=True):
            buffer = lane.next_to_fill()
            work = partial(self._kernels.gather, source, buffer.memory, part.rows)
            self._platform.launch(lane.kernels, work)
            lane.mark_filled(buffer)
            save.before, save.last = save.last, buffer
            lane.pass_on(buffer)
            self._platform.save_batch(buffer.memory, batch, lane.copies)
            lane.take_back(buffer)
        recording.end(lane.copies)

    def _wait_for_writers(self, current: Stream) -> None:
        self._platform.wait_stream(self._lane.kernels, current)
