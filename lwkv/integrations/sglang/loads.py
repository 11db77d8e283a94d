"""Batches of loads, each around one forward pass, layer by layer."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lwkv.engine import CacheEngine
from lwkv.errors import RequestError
from lwkv.integrations.sglang.order import ModelStreams
from lwkv.integrations.sglang.promises import Promise, Promises
from lwkv.pipeline.pinned_load import PinnedChunks, PinnedLoad
from lwkv.telemetry.log_throttle import LogThrottle

log = logging.getLogger(__name__)

NO_BATCH = -1
REST_S = 30.0
"""Seconds without promises after a load has failed: requests are then computed, and answered."""


@dataclass(frozen=True, slots=True)
class QueuedLoad:
    """What is to be loaded with the next batch; without a promise it cannot be.

    Attributes:
        slots: int64 (tokens,) on the device, of the first pages that were promised.
    """

    promise: Promise | None
    slots: torch.Tensor


@dataclass(slots=True, eq=False)
class LoadBatch:
    """Loads that share a transfer a layer.

    Attributes:
        is_whole: whether all of its promises could be kept.
        waited_for: layers that it has waited for; all of them once the batch is over.
    """

    load: PinnedLoad
    is_whole: bool
    waited_for: int = 0


class Loads:
    """Loads that are queued, and those of the batches under way. For the scheduler's thread.

    Args:
        num_layers: of the target model. Those of draft models come behind them, and are waited for with the
            last of these.
        streams: SGLang's: what is loaded comes behind all that they hold when a batch starts.
    """

    def __init__(
        self,
        engine: CacheEngine,
        promises: Promises,
        num_layers: int,
        streams: ModelStreams,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._rest_until = -math.inf
        self._parts = engine.parts()
        self._promises = promises
        self._num_layers = num_layers
        self._streams = streams
        self._queued: dict[str, QueuedLoad] = {}
        self._batches: dict[int, LoadBatch] = {}
        self._ended: list[PinnedLoad] = []
        self._answered: list[PinnedLoad] = []
        self._last = NO_BATCH
        self._throttle = LogThrottle(log)

    @property
    def have_ended(self) -> bool:
        """Whether `next_round` has something to do."""
        return bool(self._ended or self._answered)

    @property
    def may_offer(self) -> bool:
        """Whether loads may be promised: not for a while after one has failed, which fails its requests."""
        return self._clock() >= self._rest_until

    def queue(self, rid: str, promise: Promise | None, slots: torch.Tensor) -> None:
        """Take a load for the next batch, with the pins of its promise, in place of one before."""
        self.cancel(rid)
        self._queued[rid] = QueuedLoad(promise, slots)

    def cancel(self, rid: str) -> bool:
        """Give up a load that has not started; False if there is none."""
        load = self._queued.pop(rid, None)
        if load is None:
            return False
        self._unpin([load])
        return True

    def start(self) -> int:
        """Start what is queued, in one batch, and return its number; NO_BATCH where nothing is."""
        if not self._queued:
            return NO_BATCH
        loads, self._queued = [*self._queued.values()], {}
        kept = [
            PinnedChunks(load.promise.keys, load.promise.chunks, load.slots)
            for load in loads
            if load.promise is not None
        ]
        try:
            load = PinnedLoad(self._parts, kept, self._streams.let_wait)
        except RequestError:
            self._unpin(loads)  # else the pins are the load's from here on
            raise
        self._last += 1
        self._batches[self._last] = LoadBatch(load, is_whole=len(kept) == len(loads))
        return self._last

    def batch(self, number: int) -> LoadBatch | None:
        """The batch of this number; None where it is over."""
        return self._batches.get(number)

    def finish(self, number: int) -> bool:
        """End a batch: whether every token of it has been loaded before the model used it.

        The host waits for nothing: whoever writes to these slots later is queued behind the loads.
        """
        batch = self._batches.pop(number, None)
        if batch is None:
            return True
        loaded = batch.load.finish()
        # Not yet given back: the model computes now, and then SGLang has an answer to send.
        self._ended.append(batch.load)
        waited_for, batch.waited_for = batch.waited_for, self._num_layers
        if waited_for < self._num_layers:
            self._rest_until = math.inf
            self._throttle.warn(
                "the model waited for %d of %d layers of a load: its attention does not ask SGLang's pool "
                "for every layer. These requests fail, and from now on nothing is loaded",
                *(waited_for, self._num_layers),
            )
            return False
        if batch.is_whole and loaded:
            return True
        self._rest_until = self._clock() + REST_S
        self._throttle.warn("a load failed: its requests fail, and nothing is offered for %d s", REST_S)
        return False

    def clear(self) -> None:
        """Give up what is queued, and end the batches under way."""
        self._unpin([*self._queued.values()])
        self._queued = {}
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            batch.waited_for = self._num_layers
            batch.load.finish()
            self._ended.append(batch.load)
        self.give_back()

    def next_round(self) -> None:
        """Have what was ended before the round before given back, in the background.

        Called in every round of SGLang's scheduler. With overlap a batch is answered in the round behind the
        one that launches it.
        """
        for load in self._answered:
            load.give_back()
        self._answered, self._ended = self._ended, []

    def give_back(self) -> None:
        """The same of all that has ended."""
        self.next_round()
        self.next_round()

    def _unpin(self, loads: Sequence[QueuedLoad]) -> None:
        for load in loads:
            if load.promise is not None:
                self._promises.unpin(load.promise)


class LayerCounter:
    """What SGLang's pool waits with. Plain attributes: SGLang reads them around graphs that it replays whole.

    Attributes:
        num_layers: of the pool.
        consumer_index: the batch that the model computes now, below 0 for none. Decode steps have that of
            their request's prefill, which is over.
    """

    def __init__(self, loads: Loads, num_layers: int) -> None:
        self._loads = loads
        self._number = NO_BATCH
        self._batch: LoadBatch | None = None
        self.num_layers = num_layers
        self.consumer_index = NO_BATCH

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Make the current stream wait for `layer`, counted in the pool, and queue what comes next.

        With the pool's last layer it waits for those of draft models, too. Nothing is done twice, nor for a
        batch that is over.
        """
        number = self.consumer_index
        if number < 0:
            return
        if number != self._number:
            self._batch = self._loads.batch(number)
            self._number = NO_BATCH if self._batch is None else number
        batch = self._batch
        if batch is not None and layer >= batch.waited_for:  # the pool asks for K and for V
            if layer + 1 < self.num_layers:
                # Layers arrive together; but the pool's last is always waited for, with those of drafts.
                batch.waited_for = min(batch.load.wait(layer), self.num_layers - 1)
            else:
                batch.waited_for = batch.load.wait(batch.load.last_layer)
