"""A batch of requests on its way from the tiers to the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from lwkv.connectors.loader import Load
from lwkv.errors import DEVICE_FAILURES
from lwkv.pipeline.context import BatchContext
from lwkv.pipeline.tier_pages import Flags, TierPages
from lwkv.platforms.protocol import Int64s
from lwkv.storage import Hold, Missing
from lwkv.transfer import NO_SLOT, CheckedRequest, Transfer

log = logging.getLogger(__name__)


BeginLoad: TypeAlias = Callable[[list[Transfer], Int64s | None], Load]


@dataclass(slots=True, eq=False)
class Part:
    """One request's share of the batch: the chunks held for it, whose first token is number `start`."""

    request: CheckedRequest
    start: int
    hold: Hold
    transfer: Transfer


class BatchRetrieval:
    """Requests merged into one transfer a layer; `lwkv.pipeline.generators.retrieve_steps` drives it.

    No method raises for a layer that does not arrive. A device that fails, or has no memory, ends the load of
    all chunks. `_wanted` is the last layer that was to be queued; `_alive`, bool (chunks,), says which chunks
    are not lost.

    Args:
        begin_load: given each request's transfer, and the pages as the connector's own, to say more of the
            load than which chunks it has.
    """

    def __init__(
        self,
        requests: Sequence[CheckedRequest],
        engine: BatchContext,
        begin_load: BeginLoad | None = None,
    ) -> None:
        self.num_layers = engine.connector.num_layers
        self._requests = requests
        self._engine = engine
        self._connector = engine.connector
        self._config = engine.config
        self._begin_load = begin_load or self._begin_joined
        self._parts: list[Part] = []
        self._moved: list[int] | None = None
        self._load: Load | None = None
        self._queued = 0
        self._wanted = -1
        self._closed = False

    def hold(self) -> list[int]:
        """Look up, pin and ask the tiers, once; return for each request how many tokens are to be loaded."""
        if self._moved is None:
            for request in self._requests:
                self._parts.append(self._hold(request))
            if self._holds_any():
                self._engine.completions.expect(self)
            self._tier_pages = TierPages(self._engine, [part.hold for part in self._parts])
            self._alive = np.ones(sum(len(part.hold.found) for part in self._parts), bool)
            self._moved = [int((part.transfer.slots != NO_SLOT).sum()) for part in self._parts]
            if any(self._moved):
                self._tier_pages.ask_up_to(self._config.prefetch_layers)
        return self._moved

    def open(self) -> list[int]:
        """Begin to load what is held, as `hold` returns it."""
        moved = self.hold()
        if any(moved):
            transfers = [part.transfer for part in self._parts]
            self._load = self._try(self._begin_load, transfers, self._tier_pages.known)
        asked = [request.slots[request.first :] != NO_SLOT for request in self._requests]
        self._engine.counters.add("tokens_asked", sum(int(tokens.sum()) for tokens in asked))
        return moved

    def queue(self, layer: int) -> None:
        """Queue the loads up to `layer` that are there, and more where that keeps the link busy.

        Never blocks.
        """
        self._wanted = layer
        if self._load is not None and self._queued < self.num_layers:
            self._try(self._queue_there, self._load)

    def wait(self, layer: int) -> None:
        """Make the current stream wait for `layer`, having queued what was left of the loads up to it.

        Blocks the host until the tiers have brought these, or their time is over.
        """
        if self._load is not None:
            self._try(self._wait_for, self._load, layer)

    def result(self) -> list[torch.Tensor]:
        """For each request, bool (tokens,) on the host: True where every layer of the token was queued."""
        parts = zip(self._parts, self._tier_pages.split(self._alive), strict=True)
        masks = [_mask(part, alive) for part, alive in parts]
        self._engine.counters.add("tokens_retrieved", sum(int(mask.sum()) for mask in masks))
        return masks

    def close(self) -> None:
        """Order the model behind what is in flight, and have everything released; idempotent.

        Comes from finalizers, too, on any thread: it takes no lock that a thread of lwkv may hold.
        """
        if self._closed:
            return
        self._closed = True
        failure = None
        try:
            if self._load is not None:
                self._connector.leave_load(self._load)
        except DEVICE_FAILURES as error:
            failure = error
        finally:
            if self._holds_any():
                self._engine.completions.submit(partial(self._end, failure), self)

    def _end(self, failure: BaseException | None) -> None:
        """Give pages and tables back once the device is past them, or fails."""
        try:
            if self._load is not None:
                self._connector.end_load(self._load)
        finally:
            for part in self._parts:
                part.hold.release()
        if failure is not None:
            raise failure

    def _holds_any(self) -> bool:
        return any(part.hold.found for part in self._parts)

    def _hold(self, request: CheckedRequest) -> Part:
        first, engine = request.first // request.chunk_size, self._engine
        hold = engine.storage.hold(engine.keys_of(request), first)
        transfer = request.loads(first, first + len(hold.found))
        return Part(request, first * request.chunk_size, hold, transfer)

    def _begin_joined(self, transfers: list[Transfer], pages: Int64s | None) -> Load:
        return self._connector.begin_load(Transfer.join(transfers), pages)

    def _try(self, work: Callable[..., Any], *arguments: object) -> Any:
        """What `work` returns; None where the device fails, which ends the load."""
        try:
            return work(*arguments)
        except DEVICE_FAILURES as error:
            self._give_up(error)
            return None

    def _queue_there(self, load: Load) -> None:
        """Queue what is there of the layers wanted and, where that keeps the link busy, behind them."""
        self._tier_pages.ask_up_to(self._wanted + self._config.prefetch_layers)
        known = self._tier_pages.known is not None
        ahead = self._connector.layers_ahead(load, self._wanted, known)
        last = min(self._wanted + ahead, self.num_layers - 1)
        while self._queued <= last and self._tier_pages.are_there(self._queued):
            self._queue_next(load)

    def _wait_for(self, load: Load, layer: int) -> None:
        late = self._queued <= layer
        while self._queued <= layer:
            self._queue_next(load)
        self._connector.wait_layer(load, layer)
        if late:  # more may have arrived meanwhile, to travel while this layer computes
            self._queue_there(load)

    def _queue_next(self, load: Load) -> None:
        layer = self._queued
        try:
            self._connector.load_layer(load, layer, self._arrived(load, layer))
        except DEVICE_FAILURES as error:
            self._give_up(error)
            # Nothing is left to move, but the layer's event comes behind what was queued of it.
            self._connector.load_layer(load, layer, self._arrived(load, layer))
        self._queued += 1

    def _arrived(self, load: Load, layer: int) -> Int64s:
        """The pages of the chunks that are left; those that did not arrive are left out from here on."""
        if self._tier_pages.known is not None:
            known: Int64s = self._tier_pages.known[layer]
            return known
        pages = self._tier_pages.pages(layer, self._alive)[self._alive]
        kept = pages >= 0
        if not kept.all():
            self._drop(load, layer, pages, kept)
        arrived: Int64s = pages[kept]
        return arrived

    def _drop(self, load: Load, layer: int, pages: Int64s, kept: Flags) -> None:
        for reason in Missing:
            self._count_lost(reason.name, int((pages == reason).sum()))
        log.warning("layer %d of %d chunks did not arrive: their tokens are recomputed", layer, (~kept).sum())
        self._alive[self._alive] = kept
        self._connector.drop_chunks(load, kept)

    def _count_lost(self, reason: str, num_chunks: int) -> None:
        if num_chunks:
            self._engine.counters.add(f"load_failures_{reason.lower()}", num_chunks)
            self._engine.counters.add("load_failures", num_chunks)

    def _give_up(self, error: BaseException) -> None:
        """Load nothing more of any chunk, and trust nothing of what is on its way."""
        lost = int(self._alive.sum())
        if lost:
            self._count_lost("device", lost)
            # Not the error itself: whoever keeps log records would keep the load with it.
            log.warning("%d chunks are not loaded, their tokens are recomputed: %s", lost, repr(error))
        self._alive[:] = False
        self._tier_pages.known = np.zeros((self.num_layers, 0), np.int64)
        if self._load is not None:
            chunks = self._load.plan.transfer.num_chunks
            self._connector.drop_chunks(self._load, np.zeros(chunks, bool))


def _mask(part: Part, alive: Flags) -> torch.Tensor:
    moved = np.repeat(alive, part.transfer.chunk_tokens) & (part.transfer.slots != NO_SLOT)
    mask = np.zeros(len(part.request.ids), bool)
    mask[part.start : part.start + len(moved)] = moved
    return torch.from_numpy(mask)
