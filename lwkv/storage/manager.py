"""The storage manager: asks the tiers in order, host first, and never lets a slow one block the engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from itertools import product

import numpy as np

from lwkv.counters import Counters
from lwkv.keys import ChunkKey
from lwkv.platforms.protocol import Int64s
from lwkv.pool import HostPool
from lwkv.rarely import Rarely
from lwkv.storage.guard import Guard
from lwkv.storage.hold import Found, Hold, LayerFetch, LayerPages
from lwkv.storage.host import Chunk, HostTier
from lwkv.storage.tier import Tier
from lwkv.storage.write import Write
from lwkv.workers import Workers

log = logging.getLogger(__name__)


class StorageManager:
    """Chunks over host memory and lower tiers. Thread-safe.

    Args:
        pool: the host pages.
        num_layers: layers of every chunk.
        tiers: lower tiers, nearest first.
        timeout_s: seconds a call of a lower tier may take before it counts as failed.
        counters: where errors and refusals are counted.
        clock: seconds; when a tier is late, how long it rests, and when a line is logged again.
        use_device: called by the thread that page-locks memory, before all else.
    """

    def __init__(
        self,
        pool: HostPool,
        num_layers: int,
        tiers: Sequence[Tier] = (),
        timeout_s: float = 10.0,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.monotonic,
        use_device: Callable[[], object] | None = None,
    ) -> None:
        self.host = HostTier(pool)
        self.frozen = False
        self._pool = pool
        self._num_layers = num_layers
        self._counters = counters or Counters()
        self._tiers = [Guard(tier, pool, timeout_s, self._counters, clock) for tier in tiers]
        self._growth = Workers("growth", 1, use_device)
        self._writing: set[ChunkKey] = set()
        self._lock = threading.Lock()
        self._rarely = Rarely(log, clock)

    @property
    def writes_in_flight(self) -> int:
        """Chunks that are being stored and not yet visible."""
        with self._lock:
            return len(self._writing)

    def is_kept(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Whether each chunk is in host memory or on its way there."""
        # In this order: a write becomes visible before it is over.
        writing = [key in self._writing for key in keys]
        return [any(flags) for flags in zip(writing, self.host.contains(keys), strict=True)]

    def lookup(self, keys: Sequence[ChunkKey]) -> int:
        """Count the leading chunks that some tier has."""
        in_host = self.host.contains(keys)
        lower = self._lower_tiers(keys, in_host)
        return _prefix_length(there or tier is not None for there, tier in zip(in_host, lower, strict=True))

    def hold(self, keys: Sequence[ChunkKey], tokens: Sequence[int]) -> Hold:
        """Pin the longest cached prefix of `keys`, chunks of `tokens[i]` tokens, until `Hold.release`."""
        pinned = self.host.pin(keys)
        lower = self._lower_tiers(keys, [chunk is not None for chunk in pinned])
        found = [Found(*item) for item in zip(keys, tokens, pinned, lower, strict=True)]
        length = _prefix_length(item.chunk is not None or item.tier is not None for item in found)
        self.host.unpin([item.chunk for item in found[length:] if item.chunk is not None])
        return Hold(found[:length], self._num_layers, self.host.unpin, self._promote, self._pool.release)

    def layerwise_batched_get(self, hold: Hold, layers: Iterable[int]) -> list[Future[LayerPages]]:
        """Ask for every held chunk's page of each of `layers`; one future a layer, none of which raises.

        Pages belong to the hold, which is asked for each layer once. A chunk that fails, or finds no free
        page, is Missing in its layer. A tier that hangs keeps its future waiting: wait with a deadline.
        """
        return [self._get_layer(hold, layer) for layer in layers]

    def begin_write(self, keys: Sequence[ChunkKey], tokens: Sequence[int]) -> Write | None:
        """Take pages for all layers of those `keys` that are neither in the host tier nor on their way.

        Where memory cannot be freed for all of these, for as many as there is room for, from the first. What
        is known of `keys` is not evicted for it: chunks are of no use without those before them.

        Returns None where there is nothing to store: all known, frozen, or no room for a single one.
        """
        wanted = self._claim(keys)
        if not wanted:
            return None
        pages = self._pages_beside(keys, len(wanted))
        wanted, refused = wanted[: pages.shape[1]], wanted[pages.shape[1] :]
        if refused:
            self._refuse([keys[i] for i in refused])
        if not wanted:
            return None
        return Write(
            positions=np.array(wanted, np.int64),
            keys=[keys[i] for i in wanted],
            num_tokens=[tokens[i] for i in wanted],
            pages=pages,
            put=self.batched_put,
            unclaim=self._unclaim,
            release=self._pool.release,
        )

    def batched_put(self, keys: Sequence[ChunkKey], chunks: Sequence[Chunk]) -> None:
        """Make complete chunks visible and start copying them to the lower tiers; takes over their pages.

        They are visible even if a tier raises, which is passed on.
        """
        try:
            for tier, (key, chunk) in product(self._tiers, zip(keys, chunks, strict=True)):
                self._write_through(tier, key, chunk)
        finally:
            self.host.insert(keys, chunks)
            self._unclaim(keys)
        self._grow_ahead(sum(len(chunk.pages) for chunk in chunks))

    def allocate(self, num_pages: int) -> Int64s | None:
        """Take pages, evicting unpinned chunks if need be; None where that is not enough. Never waits."""
        pages = self._pool.allocate(num_pages)
        while pages is None and self.host.evict(self._pool.shortage(num_pages)):
            pages = self._pool.allocate(num_pages)
        return pages

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until lower tiers have what they were given; False if that took longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        return all(tier.wait_idle(deadline - time.monotonic()) for tier in self._tiers)

    def close(self, timeout_s: float) -> bool:
        """End the background work and drop every chunk that is not pinned; `timeout_s` is for all tiers.

        False if some of it did not end in time; another call waits for that.
        """
        deadline = time.monotonic() + timeout_s
        ended = [tier.close(deadline - time.monotonic()) for tier in self._tiers]
        grown = self._growth.close(deadline - time.monotonic())
        if not grown:
            log.warning("host memory was still being page-locked at the end of close")
        self.host.close()
        return grown and all(ended)

    def _pages_beside(self, keys: Sequence[ChunkKey], num_chunks: int) -> Int64s:
        """Pages for up to `num_chunks` chunks, int64 (layers, chunks), none of them taken from `keys`."""
        pages = self._pool.allocate(self._num_layers * num_chunks)
        if pages is None:
            all_new = num_chunks == len(keys)
            known = [] if all_new else [chunk for chunk in self.host.pin(keys) if chunk is not None]
            pages = self._as_many_pages(num_chunks)
            self.host.unpin(known)
        return pages.reshape(self._num_layers, -1)

    def _as_many_pages(self, num_chunks: int) -> Int64s:
        while num_chunks > 0:
            pages = self.allocate(self._num_layers * num_chunks)
            if pages is not None:
                return pages
            room = self._pool.available + self.host.evictable()
            num_chunks = min(num_chunks - 1, room // self._num_layers)
        return np.zeros(0, np.int64)

    def _refuse(self, keys: Sequence[ChunkKey]) -> None:
        self._unclaim(keys)
        self._counters.add("stores_refused")
        self._counters.add("chunks_refused", len(keys))
        self._rarely.warn("no room for %d chunks in host memory: not stored", len(keys))

    def _grow_ahead(self, num_pages: int) -> None:
        # The next store of this size is not to wait for memory to be page-locked.
        if self._pool.num_pages < self._pool.max_pages:
            self._growth.submit(partial(self._pool.grow_ahead, num_pages))

    def _get_layer(self, hold: Hold, layer: int) -> Future[LayerPages]:
        fetch = LayerFetch(hold, layer, len(hold.lower))
        for tier, keys, positions in hold.lower:
            pages = self.allocate(len(positions))
            if pages is None:
                self._counters.add("loads_without_memory", len(positions))
                fetch.lacks_memory(positions)
            else:
                fetch.watch(tier.get(keys, layer, pages), positions, pages)
        return fetch.future

    def _write_through(self, tier: Guard, key: ChunkKey, chunk: Chunk) -> None:
        self._pool.share(chunk.pages)
        with ExitStack() as undo:
            undo.callback(self._pool.release, chunk.pages)
            put = tier.put(key, chunk)
            undo.pop_all()
        put.add_done_callback(lambda _: self._pool.release(chunk.pages))

    def _lower_tiers(self, keys: Sequence[ChunkKey], in_host: Sequence[bool]) -> list[Guard | None]:
        found: list[Guard | None] = [None] * len(keys)
        for tier in self._tiers:
            rest = [i for i, known in enumerate(in_host) if not known and found[i] is None]
            for i, there in zip(rest, tier.contains([keys[i] for i in rest]), strict=True):
                found[i] = tier if there else None
        return found

    def _promote(self, keys: Sequence[ChunkKey], chunks: Sequence[Chunk]) -> None:
        if self.frozen:
            for chunk in chunks:
                self._pool.release(chunk.pages)
        else:
            self.host.insert(keys, chunks)

    def _claim(self, keys: Sequence[ChunkKey]) -> list[int]:
        if self.frozen:
            return []
        with self._lock:
            known = self.host.contains(keys)
            wanted = [i for i, key in enumerate(keys) if not known[i] and key not in self._writing]
            wanted = _distinct(keys, wanted)
            self._writing.update(keys[i] for i in wanted)
        return wanted

    def _unclaim(self, keys: Sequence[ChunkKey]) -> None:
        # No lock: a finalizer may come here on any thread. One call of a set is one step.
        self._writing.difference_update(keys)


def _prefix_length(found: Iterable[bool]) -> int:
    length = 0
    for there in found:
        if not there:
            break
        length += 1
    return length


def _distinct(keys: Sequence[ChunkKey], positions: Sequence[int]) -> list[int]:
    """The positions of each key's first occurrence: two requests of a batch may share a prefix."""
    return sorted({keys[i]: i for i in reversed(positions)}.values())
