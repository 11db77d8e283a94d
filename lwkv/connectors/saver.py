"""Saves: a layer of the device into pages of host memory, one layer at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from lwkv.codecs.page_codec import Flags
from lwkv.connectors.lane import Lane, StagingBuffer
from lwkv.connectors.transfer_plan import Plans, Slice, TransferPlan
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import Event, Int64s, Stream
from lwkv.telemetry.log_throttle import LogThrottle
from lwkv.telemetry.timeline import Timeline
from lwkv.transfer import Transfer

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Save:
    """One batch on its way to host memory.

    Attributes:
        lane: what the batch is queued on, up to its end.
        pages: where it goes, int64 (layers, chunks).
        layers_per_group: how many layers are queued one right after the other.
        sync: whether they are queued behind what the current stream holds when the last of them is computed.
        stream: the current one of the batch's last step, None before any layer is computed.
        waiting: layers that are computed and not queued yet.
        last: the staging buffer that was filled last: when it is, all blocks queued so far have been read.
        arrived: numbers of layers, and for each an event behind all copies of so many; only of coded pages,
            which are looked at while others are on their way.
        num_before: how many layers are behind `before_last`, all of their copies being before it.
        before_last: behind all copies but the last one; None where the last layer is not queued, or alone.
        coded: which pages of the first layers could be coded, bool (layers, chunks), once looked at.
        spilled: layers whose raw pages are kept beside the coded ones.
    """

    lane: Lane
    plan: TransferPlan
    pages: Int64s
    layers_per_group: int = 1
    sync: bool = True
    stream: Stream = None
    waiting: range = range(0)
    last: StagingBuffer | None = None
    arrived: list[tuple[int, Event]] = field(default_factory=list)
    before_last: Event | None = None
    num_before: int = 0
    coded: list[Flags] = field(default_factory=list)
    spilled: frozenset[int] = frozenset()


class Saver:
    """The saving side of a connector.

    The host never waits for the device here, but in `end_save`, and before staging is filled again where an
    event does not cover copies to the host.

    Args:
        group_bytes: layers are queued several at a time up to so many bytes of full pages together.
        page_bytes: of a full page.
    """

    def __init__(
        self, plans: Plans, lane: Lane, timeline: Timeline, group_bytes: int, page_bytes: int
    ) -> None:
        self.lane = lane
        self._plans = plans
        self._platform, self._device, self._layers = plans.platform, plans.device, plans.layers
        self._timeline = timeline
        self._pages_per_group = group_bytes // page_bytes
        self._check, self._pool = plans.page_check(), plans.pool
        # Layers with pages that could not be coded, as of the last batch that ended.
        self._uncodable: frozenset[int] = frozenset()
        self._throttle = LogThrottle(log, time.monotonic)

    def begin_save(self, transfer: Transfer, pages: Int64s, sync: bool = True) -> Save:
        """Start a batch of saves from the slots of `transfer`, none of which may be NO_SLOT.

        Args:
            pages: int64 (layers, chunks).
            sync: save behind what the current stream holds when a layer is given.
        """
        layers_per_group = max(1, self._pages_per_group // transfer.num_chunks)
        plan = self._plans.make(transfer, self.lane.kernels, pages)
        # Slots that only the device knows may still be put together there, by the current stream.
        sync = sync or transfer.device_slots is not None
        return Save(self.lane, plan, pages, layers_per_group, sync)

    def keep_raw(self, save: Save, allocate: Callable[[int], Int64s | None]) -> None:
        """For a batch that has just begun: keep raw pages, too, of layers that could not be coded last time.

        The host learns too late whether a page shrinks on the device to make room by then.

        Args:
            allocate: takes so many pages of the pool, or none.
        """
        for layer in sorted(self._uncodable):
            coder = self._plans.codec.coder(self._layers[layer])
            if coder is None:
                continue
            num_pages = -(-coder.raw_bytes // self._pool.page_bytes)
            spill = allocate(num_pages * save.plan.transfer.num_chunks)
            if spill is not None:
                self._pool.add_spill(save.pages[layer], spill.reshape(-1, num_pages))
                save.spilled |= {layer}

    def save_layers(self, save: Save, layers: range) -> None:
        """Save layers, one or more, that queued work of the current stream writes.

        They are queued when their group is full, at the latest in `finish_save`: a model's own code makes
        ours slow in between, and queued in a row, several layers take little more than one. Their rows must
        not change before the call that `leave_save` orders.
        """
        current = self._platform.current_stream(self._device)
        if save.waiting and (current != save.stream or layers.start != save.waiting.stop):
            self.finish_save(save)
        save.stream = current
        save.waiting = range(save.waiting.start if save.waiting else layers.start, layers.stop)
        if len(save.waiting) >= save.layers_per_group:
            self.finish_save(save)

    def finish_save(self, save: Save) -> None:
        """Queue kernels and copies of all layers that wait, behind what the stream of the last one holds."""
        waiting, save.waiting = save.waiting, range(0)
        if waiting and save.sync:
            self._wait_for_writers(save)
        for start in range(0, len(waiting), save.plan.layers_per_buffer):
            self._queue_save(save, waiting[start : start + save.plan.layers_per_buffer])

    def leave_save(self, save: Save) -> None:
        """Queue nothing more of a batch: what comes next may write to its blocks. As for `leave_load`.

        What was not queued is not saved.
        """
        save.waiting = range(0)
        if save.last is not None:
            self._platform.wait_event(save.stream, save.last.filled)
            current = self._platform.current_stream(self._device)
            if current != save.stream:
                self._platform.wait_event(current, save.last.filled)

    def end_save(self, save: Save) -> None:
        """Block until all bytes of a batch that was left are in its host pages; give its tables back."""
        self._wait_for_copies(save)
        save.plan.uploads.give_back()

    def whole_chunks(self, save: Save) -> Flags:
        """For a batch that has ended, whose layers were all saved: which chunks are good, bool (chunks,).

        A codec cannot code every page; that is known when its bytes are in host memory. Such a chunk is not,
        unless its raw pages were kept as well: `keep_raw` sees to that for the next ones.
        """
        if not save.plan.is_coded:
            return np.ones(save.pages.shape[1], bool)
        self._look(save, len(self._layers))
        if not save.spilled and all(map(np.all, save.coded)):
            self._uncodable = frozenset()
            return np.ones(save.pages.shape[1], bool)
        coded = np.concatenate(save.coded)
        self._uncodable = frozenset(np.flatnonzero(~coded.all(axis=1)).tolist())
        for layer in save.spilled:
            self._pool.drop_spill(save.pages[layer][coded[layer]])
        coded[list(save.spilled)] = True
        whole: Flags = np.logical_and.reduce(coded, axis=0)
        if not whole.all():
            self._throttle.warn(
                "%d of %d chunks are not stored: the KV of a layer does not shrink, as page_codec=%s needs. "
                "The next ones are kept with raw pages beside; if this goes on, set page_codec to raw",
                int((~whole).sum()),
                len(whole),
                self._plans.codec.name,
            )
        return whole

    def _look_early(self, save: Save, num_layers: int, event: Event) -> None:
        """Look at the pages that are there behind `event` while the last ones are on their way."""
        self._platform.d2h_fence(save.lane.copies, event)
        self._look(save, num_layers)

    def _look(self, save: Save, stop: int) -> None:
        """Find out which pages of layers up to `stop`, whose bytes are in host memory, could be coded."""
        layers = range(sum(map(len, save.coded)), stop)
        save.coded.append(self._check.fits(layers, save.pages[layers.start : layers.stop]))

    def _queue_save(self, save: Save, layers: range) -> None:
        """Queue layers that share a staging buffer."""
        lane, pages = save.lane, save.pages[layers.start]
        sources = self._layers[layers.start : layers.stop]
        spanned = layers if self._timeline.is_on else ()
        recordings = [self._timeline.span("save", layer, lane.kernels) for layer in spanned]
        for number, piece in enumerate(save.plan.slices(sources[0])):
            buffer = lane.next_to_fill()
            if save.plan.is_coded:
                self._gather_coded(save, layers, buffer.memory, number, piece)
            else:
                self._gather(save, sources, buffer.memory, piece)
            lane.mark_filled(buffer)
            self._mark_arrived(save, layers)
            save.last = buffer
            lane.pass_on(buffer)
            # Worked out behind the kernels, which run meanwhile.
            batch = save.plan.copy(layers, number, sources[0], pages)
            self._platform.save_batch(buffer.memory, batch, lane.copies)
            lane.take_back(buffer)
        for recording in recordings:
            recording.end(lane.copies)

    def _gather(self, save: Save, sources: Sequence[PagedLayer], staging: torch.Tensor, piece: Slice) -> None:
        """Queue what turns a slice's rows of `sources` into raw pages in `staging`."""
        save.lane.move(save.plan.staged(sources, staging, piece.rows))

    def _gather_coded(
        self, save: Save, layers: range, staging: torch.Tensor, number: int, piece: Slice
    ) -> None:
        """The same of slice `number` of `layers`, and what codes these pages into a staging buffer."""
        sources, coder = self._layers[layers.start : layers.stop], self._plans.paged_coder
        if coder is not None and save.plan.is_whole and save.spilled.isdisjoint(layers):
            work = partial(coder.encode, sources, piece.rows.slots, staging, save.plan.num_pages(number))
            save.lane.code_in_cache(coder, work)
            return
        lane, coding = save.lane, save.plan.coding(sources, number)
        if coding.has_gaps:
            lane.clear()
        self._gather(save, sources, lane.raw_pages, piece)
        lane.encode(staging, coding)
        for place, layer in enumerate(layers):
            if layer in save.spilled:
                self._spill(save, place, layer, number)

    def _spill(self, save: Save, place: int, layer: int, number: int) -> None:
        """Queue the copies of a layer's raw pages beside the coded ones."""
        kernels = save.lane.kernels
        batch = save.plan.spill_copies(self._layers[layer], place, number, save.pages[layer])
        if batch is not None:
            self._platform.save_batch(save.lane.raw_pages, batch, kernels)
            # What codes the next ones writes there; and the copies that follow tell of the end of these.
            event = self._platform.new_event()
            self._platform.record(event, kernels)
            self._platform.d2h_fence(kernels, event, kernels)

    def _mark_arrived(self, save: Save, layers: range) -> None:
        """Record that the copies queued so far are done, where that matters: `layers` are queued next.

        Before the last layers, and where pages are looked at, also halfway there, and again halfway from
        there. The events are this batch's own: see `Lane`.
        """
        if save.last is None:
            return
        end, last = len(self._layers), save.arrived[-1][0] if save.arrived else 0
        if layers.stop == end:
            save.num_before = layers.start
            save.before_last = save.before_last or self._platform.new_event(blocking=True)
            self._platform.record(save.before_last, save.lane.copies)
        elif save.plan.is_coded and last < layers.start and 2 * layers.start >= last + end:
            save.arrived.append((layers.start, self._platform.new_event(blocking=True)))
            self._platform.record(save.arrived[-1][1], save.lane.copies)

    def _wait_for_writers(self, save: Save) -> None:
        self._platform.wait_stream(save.lane.kernels, save.stream)

    def _wait_for_copies(self, save: Save) -> None:
        if save.before_last is not None:
            # A thread that sleeps until an event wakes up late: it sleeps until the last copy but one.
            for num_layers, event in (*save.arrived, (save.num_before, save.before_last)):
                self._platform.synchronize_event(event)
                if save.plan.is_coded:
                    self._look_early(save, num_layers, event)
        event = self._platform.new_event(blocking=save.before_last is None)
        self._platform.record(event, save.lane.copies)
        self._platform.d2h_fence(save.lane.copies, event)
