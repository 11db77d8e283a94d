"""A batch of requests on its way from the tiers to the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from lwkv.connectors.loader import Load, Loader
from lwkv.errors import DEVICE_FAILURES
from lwkv.pipeline.context import BatchContext
from lwkv.pipeline.device_failures import DeviceFailuresTo
from lwkv.pipeline.tier_pages import Flags, TierPages
from lwkv.platforms.protocol import Event, Int64s
from lwkv.storage import Chunk, Hold, Missing
from lwkv.transfer import NO_SLOT, CheckedRequest, Transfer

log = logging.getLogger(__name__)


BeginLoad: TypeAlias = Callable[[list[Transfer], Int64s | None], Load]


@dataclass(slots=True, eq=False)
class HeldRequest:
    """One request of the batch: the chunks held for it, whose first token is number `start`."""

    request: CheckedRequest
    start: int
    hold: Hold
    transfer: Transfer


class BatchRetrieval:
    """Requests merged into one transfer a layer, and the cursor over their layers.

    `open` looks up, `advance` goes from layer to layer, `finish` or `finish_apart` gives the masks; `close`,
    or dropping it, gives up what is left. No method raises for a layer that does not arrive. A device that
    fails, or has no memory, ends the load of all chunks.

    Args:
        sync: make the current stream wait for each layer; False for the last one only, which comes after all.
        loader: another one than the connector's first.
        begin_load: given each request's transfer, and the pages as the loader's own, to say more of the load
            than which chunks it has.
        in_host: numbers of requests of which only what is in host memory is loaded.
        within_s: seconds from the beginning of the look-up; then lower tiers are not waited for any more,
            even if the look-up's or a layer's own time is not over.
        pinned: for each request what `StorageManager.hold` takes as such; the batch's from here on.

    Attributes:
        is_open: whether `open` was called.
        reached: the layer of the last `advance`: it is queued, if it is there, and the one before waited for.
    """

    is_open = _closed = _is_apart = _is_expected = False

    def __init__(
        self,
        requests: Sequence[CheckedRequest],
        context: BatchContext,
        sync: bool = True,
        loader: Loader[Any] | None = None,
        begin_load: BeginLoad | None = None,
        in_host: Collection[int] = (),
        within_s: float = float("inf"),
        pinned: Sequence[Sequence[Chunk | None] | None] = (),
    ) -> None:
        self.num_layers = context.connector.num_layers
        self.reached = -1
        self._requests = requests
        self._context = context
        self._loader = loader or context.connector.loader
        self._config = context.config
        self._sync = sync
        self._begin_load = begin_load
        self._in_host = in_host
        self._within_s = within_s
        self._pinned = list(pinned) or [None] * len(requests)
        if any(self._pinned):
            self._expect_end()
        self._held: list[HeldRequest] = []
        self._moved: list[int] | None = None
        self._load: Load | None = None
        self._queued = 0

    def __del__(self) -> None:
        self.close()

    def hold(self) -> list[int]:
        """Look up, pin and ask the tiers, once; return for each request how many tokens are to be loaded."""
        if self._moved is None:
            until = self._context.clock() + self._within_s
            for number, request in enumerate(self._requests):
                pinned, self._pinned[number] = self._pinned[number], None
                self._held.append(self._hold(request, number in self._in_host, until, pinned))
            if self._holds_any():
                self._expect_end()
            self._tier_pages = TierPages(self._context, [held.hold for held in self._held], until)
            # Which chunks are not lost.
            self._alive = np.ones(sum(len(held.hold.found) for held in self._held), bool)
            self._moved = [int((held.transfer.slots != NO_SLOT).sum()) for held in self._held]
            if any(self._moved):
                self._tier_pages.ask_up_to(self._config.prefetch_layers)
        return self._moved

    def open(self) -> list[int]:
        """Begin to load what is held, as `hold` returns it; once."""
        moved = self.hold()
        self.is_open = True
        if any(moved):
            with DeviceFailuresTo(self._give_up):
                self._load = self._begin([held.transfer for held in self._held], self._tier_pages.known)
        asked = [request.slots[request.first :] != NO_SLOT for request in self._requests]
        self._context.counters.add("tokens_asked", sum(int(tokens.sum()) for tokens in asked))
        return moved

    def advance(self, layer: int) -> None:
        """Queue layer N = `layer` and, if `sync`, make the current stream wait for layer N - 1; then return.

        So once the hook of layer N has called this with N + 1, the stream waits for N, and N + 1 is queued.
        Layers before these that were left out are made up for. A layer whose pages have not arrived is left
        for the call that has to wait for it: only there the host blocks, until the tiers have brought it, or
        its time is over. Layers behind N are queued too where that keeps the link busy. Nothing is done a
        second time. To be called after `open`; `num_layers` stands for the end, behind the last layer.
        """
        while self.reached < layer:
            self.reached += 1
            load = self._load
            if load is None:
                continue
            if self._queued < self.num_layers:
                with DeviceFailuresTo(self._give_up):
                    self._queue_arrived(load)
            if self.reached == self.num_layers or (self._sync and self.reached):
                with DeviceFailuresTo(self._give_up):
                    late = self._queued < self.reached
                    while self._queued < self.reached:
                        self._queue_next(load)
                    if not self._is_apart:
                        self._loader.wait_layer(load, self.reached - 1)
                    if late:  # more may have arrived meanwhile, to travel while this layer computes
                        self._queue_arrived(load)

    def is_coming(self, layer: int) -> bool:
        """Whether a layer is queued, and its loads are not on the device yet: who computes it now waits."""
        event = None if self._load is None else self._load.arrived[layer]
        return event is not None and not self._context.connector.platform.query(event)

    def finish(self) -> list[torch.Tensor]:
        """Advance behind the last layer and release everything.

        Returns:
            for each request, bool (tokens,) on the host: True where every layer of the token was queued.
        """
        self.advance(self.num_layers)
        masks = self._count_masks()
        self.close()
        return masks

    def finish_apart(self) -> tuple[list[torch.Tensor], Event | None]:
        """As `finish`, and at once, but no stream is made to wait: the slots may still be written to.

        Returns:
            the masks, and an event behind all that was queued, to be queried or waited for before the slots
            are used; None where nothing is on its way that the current stream does not wait for.
        """
        self._sync, self._is_apart, arrival = False, True, None
        self.advance(self.num_layers)
        if self._load is not None:
            with DeviceFailuresTo(self._give_up):
                arrival = self._loader.take_arrival(self._load)
        masks = self._count_masks()
        self.close()
        return masks, arrival

    def _count_masks(self) -> list[torch.Tensor]:
        pairs = zip(self._held, self._tier_pages.split(self._alive), strict=True)
        masks = [_mask(held, alive) for held, alive in pairs]
        self._context.counters.add("tokens_retrieved", sum(int(mask.sum()) for mask in masks))
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
                self._loader.leave_load(self._load)
        except DEVICE_FAILURES as error:
            failure = error
        finally:
            # Also where of what was pinned nothing is held: the thread stays until then.
            if self._is_expected or self._holds_any():
                self._context.completions.submit(partial(self._end, failure), self)

    def _expect_end(self) -> None:
        """Have the thread that ends batches stay until this one has ended."""
        self._is_expected = True
        self._context.completions.expect(self)

    def _end(self, failure: BaseException | None) -> None:
        """Give pages and tables back once the device is past them, or fails."""
        try:
            if self._load is not None:
                self._loader.end_load(self._load)
        finally:
            for held in self._held:
                held.hold.release()
            self._unpin()
        if failure is not None:
            raise failure

    def _unpin(self) -> None:
        """Give back what was pinned for requests that were not held."""
        pinned, self._pinned = self._pinned, []
        chunks = [chunk for some in pinned if some is not None for chunk in some if chunk is not None]
        self._context.storage.host.unpin(chunks)

    def _holds_any(self) -> bool:
        return any(held.hold.found for held in self._held)

    def _hold(
        self,
        request: CheckedRequest,
        in_host: bool,
        until: float,
        pinned: Sequence[Chunk | None] | None,
    ) -> HeldRequest:
        first, context = request.first // request.chunk_size, self._context
        within_s = max(0.0, until - context.clock())
        hold = context.storage.hold(context.keys_of(request), first, in_host, within_s, pinned=pinned)
        transfer = request.loads(first, first + len(hold.found))
        return HeldRequest(request, first * request.chunk_size, hold, transfer)

    def _begin(self, transfers: list[Transfer], pages: Int64s | None) -> Load:
        if self._begin_load is not None:
            return self._begin_load(transfers, pages)
        load: Load = self._loader.begin_load(Transfer.join(transfers), pages)
        return load

    def _queue_arrived(self, load: Load) -> None:
        """Queue what is there of the layers wanted and, where that keeps the link busy, behind them."""
        wanted = min(self.reached, self.num_layers - 1)
        self._tier_pages.ask_up_to(wanted + self._config.prefetch_layers)
        known = self._tier_pages.known is not None
        ahead = self._loader.layers_ahead(load, wanted, known)
        last = min(wanted + ahead, self.num_layers - 1)
        while self._queued <= last and self._tier_pages.are_there(self._queued):
            self._queue_next(load)

    def _queue_next(self, load: Load) -> None:
        layer = self._queued
        try:
            self._loader.load_layer(load, layer, self._arrived(load, layer))
        except DEVICE_FAILURES as error:
            self._give_up(error)
            # Nothing is left to move, but the layer's event comes behind what was queued of it.
            self._loader.load_layer(load, layer, self._arrived(load, layer))
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
        self._context.throttle.warn(
            "layer %d of %d chunks did not arrive: their tokens are recomputed", layer, (~kept).sum()
        )
        self._alive[self._alive] = kept
        self._loader.drop_chunks(load, kept)

    def _count_lost(self, reason: str, num_chunks: int) -> None:
        if num_chunks:
            self._context.counters.add(f"load_failures_{reason.lower()}", num_chunks)
            self._context.counters.add("load_failures", num_chunks)

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
            self._loader.drop_chunks(self._load, np.zeros(chunks, bool))


def _mask(held: HeldRequest, alive: Flags) -> torch.Tensor:
    moved = np.repeat(alive, held.transfer.chunk_tokens) & (held.transfer.slots != NO_SLOT)
    mask = np.zeros(len(held.request.ids), bool)
    mask[held.start : held.start + len(moved)] = moved
    return torch.from_numpy(mask)
