"""What a linker of SGLang does, without SGLang."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol
from uuid import uuid4

import torch

from lwkv.engine import CacheEngine
from lwkv.integrations.sglang.bring_up import BringUp
from lwkv.integrations.sglang.loads import LayerCounter, Loads
from lwkv.integrations.sglang.offloads import Offloads
from lwkv.integrations.sglang.order import ModelStreams, Order
from lwkv.integrations.sglang.page_keys import page_keys
from lwkv.integrations.sglang.promises import Promises
from lwkv.request import KeyedChunks

log = logging.getLogger(__name__)

MOST_LENGTHS = 128
"""Hits that a lookup gives to several ranks: where these differ, 1/128 of a prompt or less is computed."""


class PoolTransfer(Protocol):
    """SGLang's PoolTransfer, of the one pool there is.

    Attributes:
        keys: hashes of pages, chained from the sequence's start.
        device_indices: int64 (pages * page size,), the slot of each token; None in a lookup.
    """

    keys: list[str] | None
    device_indices: torch.Tensor | None


class CacheLink:
    """SGLang's radix tree over a cache engine whose chunks are the tree's pages.

    For the scheduler's thread, which never waits here for the device or for a tier, except in `reset` and
    `close`. Only what is in host memory and pinned is ever offered: SGLang fails a request whose load fails.

    Args:
        num_layers: of the target model.
        num_ranks: workers that must answer alike.
        forward_stream: see ModelStreams.
        forgets: whether `reset` makes all that was stored before unfindable.
        flush_name: what keys have in them after a `reset`, with the number of these. Where ranks find each
            other's rows it is the same for all; nobody else has it.
    """

    def __init__(
        self,
        engine: CacheEngine,
        num_layers: int,
        num_ranks: int = 1,
        forward_stream: Any = None,
        forgets: bool = True,
        flush_name: str | None = None,
    ) -> None:
        self.engine = engine
        self._flush_name, self._num_flushes = flush_name or uuid4().hex, 0
        self.namespace = engine.namespace
        self._forgets = forgets
        self._num_ranks = num_ranks
        self._timeout_s = engine.config.load_timeout_s
        connector, storage = engine.connector, engine.parts().storage
        streams = ModelStreams(connector.platform, connector.device, forward_stream)
        self._promises = Promises(storage.host, storage.most_chunks // 2)
        self._bring_up = BringUp(storage, self._timeout_s)
        self._loads = Loads(engine, self._promises, num_layers, streams)
        self._offloads = Offloads(engine, Order(streams))
        self.layer_counter = LayerCounter(self._loads, num_layers)

    def lookup(self, rid: str, transfers: Sequence[PoolTransfer]) -> list[int]:
        """The numbers of leading pages that can be loaded; they are pinned for request `rid`.

        SGLang takes the largest that all ranks give, and takes time for each of them. So a single rank gives
        the largest only, and several the same MOST_LENGTHS or fewer of all that may be asked for, and the
        largest.

        Pages of lower tiers are asked for in the background, and offered when they are in host memory.
        """
        hashes = transfers[0].keys
        if not hashes or not self._loads.may_offer:
            return []
        promise = self._promises.promise(rid, self.namespace, hashes)
        length = len(promise.keys)
        if length < len(hashes) and not promise.asked_below:
            promise.asked_below = self._bring_up.ask(self.namespace, hashes, length)
        return self._lengths(length, len(hashes))

    def load(self, rid: str, transfers: Sequence[PoolTransfer]) -> bool:
        """Queue a load of promised pages; False, to have them computed, where the promise has ended."""
        hashes, slots = _contents(transfers[0])
        promise = self._promises.take(rid, hashes)
        if promise is None and self._num_ranks == 1:
            return False
        # With several ranks all must say the same, and the others may have theirs.
        self._loads.queue(rid, promise, slots)
        return True

    def start_layer_wise_loading(self) -> int:
        return self._loads.start()

    def finish_layer_wise_loading(self, index: int) -> bool:
        return self._loads.finish(index)

    def cancel_queued_load(self, rid: str) -> bool:
        return self._loads.cancel(rid)

    def offload(self, transfers: Sequence[PoolTransfer]) -> bool:
        """Queue pages to be kept; False where there are none."""
        if not transfers:
            return False
        hashes, slots = _contents(transfers[0])
        parent = self._promises.chains.parent(hashes[0])
        before = page_keys(self.namespace, [] if parent is None else [parent])
        keys = page_keys(self.namespace, hashes)
        self._offloads.queue(KeyedChunks(keys, slots, before[0] if before else None))
        return True

    def num_completed_offloads(self) -> int:
        """How many stores are over and not taken. SGLang asks in every round of its scheduler.

        What was handed over since is begun, and loads that are over are given back.
        """
        # Only what has something to do: an idle scheduler asks thousands of times a second.
        if self._promises.by_request:
            self._promises.expire()
        # First of all: what is given back wakes a thread, which would take its time from these calls.
        completed = self._offloads.num_completed() if self._offloads.queued else len(self._offloads.results)
        if self._loads.have_ended:
            self._loads.next_round()
        return completed

    def pop_completed_offload(self) -> bool:
        return self._offloads.pop()

    def reset(self) -> None:
        """End all that is under way. Blocks until nothing reads or writes SGLang's pages any more."""
        self._loads.clear()
        self._promises.clear()
        if not self._offloads.clear(self._timeout_s):
            log.warning("transfers were still under way %.1f s after a reset began", self._timeout_s)
        self.layer_counter.consumer_index = -1
        if self._forgets:
            # SGLang flushes when it has new weights, and does not say so: nothing of before may be found.
            self._num_flushes += 1
            self.namespace = f"{self.engine.namespace}.{self._flush_name}.{self._num_flushes}"

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until all that was started is over; False if that takes over `timeout_s` seconds.

        What SGLang has offloaded is started by `num_completed_offloads`.
        """
        self._loads.give_back()
        deadline = time.monotonic() + timeout_s
        completions = self.engine.parts().completions
        return all(part.wait_idle(deadline - time.monotonic()) for part in (completions, self._bring_up))

    def close(self) -> None:
        """Give everything back; idempotent."""
        self.reset()
        self._bring_up.close(self._timeout_s)
        self.engine.close()

    def _lengths(self, length: int, num_asked: int) -> list[int]:
        """All that a lookup has to give where the first `length` of `num_asked` pages can be loaded."""
        step = num_asked if self._num_ranks == 1 else -(-num_asked // MOST_LENGTHS)
        return [*range(step, length, step), length] if length else []


def _contents(transfer: PoolTransfer) -> tuple[list[str], torch.Tensor]:
    assert transfer.keys
    assert transfer.device_indices is not None
    return transfer.keys, transfer.device_indices
