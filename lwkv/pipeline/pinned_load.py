"""Chunks that are pinned in host memory, on their way to the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from lwkv.connectors.loader import Load
from lwkv.errors import DEVICE_FAILURES
from lwkv.keys import ChunkKey
from lwkv.pipeline.context import BatchContext
from lwkv.pipeline.device_failures import DeviceFailuresTo
from lwkv.platforms import Stream
from lwkv.platforms.protocol import Int64s
from lwkv.request import check_device_slots
from lwkv.storage import Chunk
from lwkv.transfer import Chunking, Transfer

log = logging.getLogger(__name__)

NEXT_LAYERS = 4
"""As many layers behind one that is waited for are on their way: before these are fewer no more are queued.

Then several are queued in a row, which takes less time than one by one.
"""

LetWait: TypeAlias = Callable[[Stream], object]


@dataclass(frozen=True, slots=True)
class PinnedChunks:
    """Neighbouring chunks of a prompt that the caller has pinned, and where they go.

    Args:
        keys, chunks: one of each for every chunk.
        slots: int64 (chunks * chunk_size,), on the device of the caches; as KeyedChunks'.
    """

    keys: Sequence[ChunkKey]
    chunks: Sequence[Chunk]
    slots: torch.Tensor


class PinnedLoad:
    """Loads whose pages are all known, merged into one transfer a layer, and the cursor over their layers.

    A BatchRetrieval for callers that have looked up and pinned before: there is no tier to ask and no chunk
    to miss, so that the host does little more for many chunks than for few. The pins are the load's from here
    on. A device that fails, or has no memory, ends the load of all chunks; it never raises.

    A few layers are queued by the constructor: the batch is prepared between that and the model's launch. The
    others are queued by `wait`, ahead of the model. All on the caller's thread: another thread of Python gets
    its turn after up to 5 ms only, while the model is being launched, and takes as much from it. Until
    `finish` no other load or save may be begun. `give_back` ends it, in the background.

    Args:
        loads: all of one batch.
        let_wait: makes a stream wait for all that may still use the slots, or has yet to write `slots`.

    Attributes:
        last_layer: the number of the last one.
        has_failed: whether the slots may lack what was to be loaded.

    Raises:
        RequestError: slots that do not fit the chunks, or are not where the caches are. The pins stay.
    """

    def __init__(self, context: BatchContext, loads: Sequence[PinnedChunks], let_wait: LetWait) -> None:
        connector = context.connector
        chunking = Chunking(context.config.chunk_size, False, connector.tokens_per_row)
        for load in loads:
            check_device_slots(load.slots, len(load.keys), chunking, connector.device)
        self.has_failed = False
        self._context = context
        self._loader = connector.loader
        self._platform, self._device = connector.platform, connector.device
        self._loads = loads
        self._num_layers = connector.num_layers
        self.last_layer = connector.num_layers - 1
        self._num_chunks = sum(len(load.chunks) for load in loads)
        self._num_tokens = self._num_chunks * chunking.chunk_size
        self._load: Load | None = None
        self._queued = 0
        self._failure: BaseException | None = None
        context.completions.expect(self)
        context.counters.add("tokens_asked", self._num_tokens)
        if self._num_chunks:
            with DeviceFailuresTo(self._give_up):
                self._begin(let_wait)

    def wait(self, layer: int) -> int:
        """Make the current stream wait for `layer`, and queue what comes next; the host does not wait.

        Layers may be left out: each comes behind all before it. Returns how many the stream has waited for by
        now: layers that share staging arrive together.
        """
        load = self._load
        if load is None:
            return layer + 1
        if self._queued < min(layer + 1 + NEXT_LAYERS, self._num_layers):
            self._queue_ahead(load, min(layer + 1, self._num_layers - 1))
        stream = self._platform.current_stream(self._device)
        event, behind = load.arrived[layer], layer + 1
        while event is not None and behind < self._num_layers and load.arrived[behind] is event:
            behind += 1
        if load.waited_for != (event, stream) and not self.has_failed:
            # As DeviceFailuresTo, in fewer calls: once for every layer.
            try:
                self._loader.wait_layer(load, layer, stream)
            except DEVICE_FAILURES as error:
                self._note_failure(error)
        return behind

    def finish(self) -> bool:
        """Order the model behind what is in flight: whether all of it was queued.

        Called once. The host does not wait for the device.
        """
        if self._load is not None:
            self._queue_up_to(self._load, self._num_layers - 1)
            try:
                self._leave(self._load)
            except DEVICE_FAILURES as error:
                self._failure, self.has_failed = error, True
        if not self.has_failed:
            self._context.counters.add("tokens_retrieved", self._num_tokens)
        return not self.has_failed

    def give_back(self) -> None:
        """Have pins and tables given back once the device is past them; called once, after `finish`.

        The thread that does it takes its time from the caller's: a good moment is when nobody waits for that.
        """
        self._context.completions.submit(partial(self._end, self._failure), self)

    def _begin(self, let_wait: LetWait) -> None:
        counts = np.full(self._num_chunks, self._context.config.chunk_size)
        slots = [load.slots for load in self._loads]
        on_device = slots[0] if len(slots) == 1 else torch.cat(slots)
        transfer = Transfer(counts, np.zeros(self._num_tokens, np.int64), on_device)
        self._pages = self._all_pages()
        self._load = load = self._loader.begin_load(transfer, self._pages)
        self._loader.come_behind(load, let_wait)
        at_first = range(self._loader.layers_at_first(load))
        self._loader.load_layers(load, at_first, self._pages)
        self._queued = at_first.stop

    def _all_pages(self) -> Int64s:
        """The pages of every layer, int64 (layers, chunks)."""
        pages = [chunk.pages for load in self._loads for chunk in load.chunks]
        # As np.stack would, which takes twice as long.
        by_layer: Int64s = np.concatenate(pages).reshape(len(pages), -1).T
        return by_layer

    def _queue_ahead(self, load: Load, layer: int) -> None:
        """Queue `layer` and, where that keeps the link busy, those behind it."""
        ahead = self._loader.layers_ahead(load, layer, known=True)
        self._queue_up_to(load, min(layer + ahead, self._num_layers - 1))

    def _queue_up_to(self, load: Load, layer: int) -> None:
        if self.has_failed or layer < self._queued:
            return
        with DeviceFailuresTo(self._give_up):
            self._loader.load_layers(load, range(self._queued, layer + 1), self._pages)
            self._queued = layer + 1

    def _leave(self, load: Load) -> None:
        """Have the streams that the model waited on, and the current one, wait for all that was queued."""
        queued = [event for event in load.arrived if event is not None]
        event, stream = load.waited_for or (None, self._platform.current_stream(self._device))
        load.not_waited_for = queued[-1] if queued and queued[-1] is not event else None
        load.stream = stream
        self._loader.leave_load(load)

    def _give_up(self, error: BaseException) -> None:
        """Queue nothing more."""
        self._note_failure(error)
        if self._load is not None and None in self._load.arrived:
            layer = self._load.arrived.index(None)
            self._loader.drop_chunks(self._load, np.zeros(self._num_chunks, bool))
            # Nothing is left to move, but whoever comes next is to wait for what was queued of this layer. A
            # device that takes no event either has nothing left to wait for.
            with suppress(*DEVICE_FAILURES):
                self._loader.load_layer(self._load, layer, self._pages[layer, :0])

    def _note_failure(self, error: BaseException) -> None:
        """Trust nothing of what is on its way."""
        is_first, self.has_failed = not self.has_failed, True
        if is_first:
            for name in ("load_failures_device", "load_failures"):
                self._context.counters.add(name, self._num_chunks)
            # Not the error itself: whoever keeps log records would keep the load with it.
            log.warning("%d chunks are not loaded: %s", self._num_chunks, repr(error))

    def _end(self, failure: BaseException | None) -> None:
        """Give pages and tables back once the device is past them, or fails."""
        try:
            if self._load is not None:
                self._loader.end_load(self._load)
        finally:
            for load in self._loads:
                self._context.storage.end_pinned(load.keys, load.chunks)
        if failure is not None:
            raise failure
