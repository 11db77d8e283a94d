"""The storage manager: asks the tiers in order, host first, and never lets a slow one block the engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial

import numpy as np

from lwkv.background.workers import Workers
from lwkv.keys import ChunkKey, LayerKey
from lwkv.platforms.protocol import Int64s
from lwkv.pool.host_pool import HostPool
from lwkv.storage.chunk_parts import parts_of_chunk
from lwkv.storage.guard import Check, Guard, all_whole
from lwkv.storage.hold import Found, Hold, LayerFetch, LayerPages, take_over
from lwkv.storage.host_tier import Chunk, HostChunks, HostTier
from lwkv.storage.lower_tiers import LowerTiers
from lwkv.storage.prefix_order import parents_of
from lwkv.storage.prompt_part import PromptPart, prompt_parts
from lwkv.storage.tier import HOST, Tier
from lwkv.storage.write import UnnamedWrite, Write
from lwkv.telemetry.counters import Counters
from lwkv.telemetry.log_throttle import LogThrottle
from lwkv.telemetry.tier_meter import Meter

log = logging.getLogger(__name__)


class StorageManager:
    """Chunks over host memory and lower tiers. Thread-safe.

    Args:
        pool: the host pages.
        num_layers: layers of every chunk.
        tiers: lower tiers, nearest first.
        timeout_s: seconds a call of a lower tier may take before it counts as failed.
        counters: where errors and refusals are counted.
        clock: seconds; when a tier is late, how long it is skipped, and when a line is logged again.
        use_device: called by the thread that page-locks memory, before all else.
        keep_in_host: False where pages only pass through host memory, to and from lower tiers.
        write_back: when lower tiers get chunks, see LowerTiers.
        check: of what lower tiers bring, see Guard.
        host: which chunks are in `pool`; None for those that this manager puts there.
        saves: False where another engine saves the same chunks to the same host memory.
        lower: the lower tiers, shared with other managers of the same pool; None to make them of `tiers`.

    Attributes:
        num_layers: layers of every chunk.
        most_chunks: that host memory has room for; no more are found of a prompt.
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
        keep_in_host: bool = True,
        write_back: bool = False,
        check: Check = all_whole,
        host: HostChunks | None = None,
        saves: bool = True,
        lower: LowerTiers | None = None,
    ) -> None:
        own = HostTier(pool)
        self._own_host = own if host is None else None
        self.host: HostChunks = own if host is None else host
        self.frozen = False
        self._pool = pool
        self.num_layers = num_layers
        self.most_chunks = pool.max_pages // num_layers
        self._counters = counters or Counters()
        guards = [Guard(tier, pool, timeout_s, self._counters, clock, check) for tier in tiers]
        self.lower = lower or LowerTiers(guards, pool, write_back)
        self._clock = clock
        self._keep_in_host = keep_in_host
        self._saves = saves
        self._meter = Meter()
        self._growth = Workers("growth", 1, use_device)
        self._writing: set[ChunkKey] = set()
        self._lock = threading.Lock()
        self._throttle = LogThrottle(log, clock)

    @property
    def writes_in_flight(self) -> int:
        """Chunks that are being stored and not yet visible."""
        with self._lock:
            return len(self._writing)

    def is_kept(self, keys: Sequence[ChunkKey]) -> list[bool | None]:
        """Whether each chunk is in host memory; None for one on its way there."""
        # In this order: a write becomes visible before it is over.
        coming = [None if key in self._writing else False for key in keys]
        return [there or other for there, other in zip(self.host.contains(keys), coming, strict=True)]

    def lookup(self, keys: Sequence[ChunkKey]) -> int:
        """Count the leading chunks that some tier has."""
        in_host = self.host.contains(keys)
        lower = self.lower.find(keys, in_host)
        there = zip(in_host, lower, strict=True)
        length = _prefix_length([in_memory or tier is not None for in_memory, tier in there])
        length = min(length, self.most_chunks)
        if not all(in_host[:length]):
            self.lower.follow(keys[:length])  # what was promised is not to go before it is loaded
        return length

    def hold(
        self,
        keys: Sequence[ChunkKey],
        first: int = 0,
        in_host: bool = False,
        within_s: float = float("inf"),
        is_noted: bool = False,
        pinned: Sequence[Chunk | None] | None = None,
    ) -> Hold:
        """Pin the longest cached prefix of `keys` from chunk `first` on until `Hold.release`.

        Args:
            keys: all chunks of a prompt. Those before `first` are used as well, and not held.
            in_host: take what is in host memory only: no tier below is asked, nor waited for.
            within_s: seconds after which no tier below is waited for, if that is before the end of its time.
            is_noted: whether `note_use` was called for the prompt.
            pinned: what is in host memory of the chunks from `first` on, where the caller has pinned it and
                used the prompt; the hold's from here on. None to look for it.
        """
        prompt, parents = keys, parents_of(keys)[first:]
        keys = keys[first:]
        is_used = is_noted or pinned is not None
        pinned = self.host.pin(keys) if pinned is None else pinned
        lower = self.lower.find(keys, [in_host or chunk is not None for chunk in pinned], within_s)
        found = [Found(*item) for item in zip(keys, pinned, lower, parents, strict=True)]
        length = _prefix_length([item.chunk is not None or item.tier is not None for item in found])
        # All chunks of a hold are in host memory at the end: what cannot be there is not promised.
        length = min(length, self.most_chunks)
        self.host.unpin([item.chunk for item in found[length:] if item.chunk is not None])
        self._note_found(found, length)
        if not is_used:
            self.host.use(prompt[:first])
        prompt = prompt[: first + length]
        if not is_noted:
            self.lower.follow(prompt)
        promote = partial(self._promote, self.lower.part_of(prompt))
        return Hold(found[:length], self.num_layers, self.host.unpin, promote, self._pool.release)

    def note_use(self, prompt: Sequence[ChunkKey]) -> None:
        """Note in all tiers that a prompt is used that begins with these chunks; never blocks."""
        self.host.use(prompt)
        self.lower.follow(prompt)

    def end_pinned(self, keys: Sequence[ChunkKey], chunks: Sequence[Chunk]) -> None:
        """Note that a prompt's chunks have been loaded that `HostTier.pin_prefix` gave, and unpin them."""
        try:
            self.note_use(keys)
        finally:
            self.host.unpin(chunks)
        self._meter.note_found(len(chunks), 0)

    def layerwise_batched_get(self, hold: Hold, layers: Iterable[int]) -> list[Future[LayerPages]]:
        """Ask for every held chunk's page of each of `layers`; one future a layer, none of which raises.

        Pages belong to the hold, which is asked for each layer once. A chunk that fails, or finds no free
        page, is Missing in its layer. A tier that hangs keeps its future waiting: wait with a deadline.
        """
        return [self._get_layer(hold, layer) for layer in layers]

    def batched_get(self, hold: Hold, over: Callable[[], object]) -> list[Future[Int64s]]:
        """Ask lower tiers for all layers of every held chunk, which nobody waits for layer by layer.

        A chunk takes few calls, each of many neighbouring layers: calls take the interpreter from the threads
        that launch kernels. Returned are the calls, those that have not begun may be cancelled; a chunk for
        which there are no pages has none.

        Args:
            over: called for each call, on any thread, when what it has brought belongs to the hold.
        """
        chunks = [
            (guard, key, position)
            for guard, keys, positions in hold.lower
            for key, position in zip(keys, positions.tolist(), strict=True)
        ]
        return [call for chunk in chunks for call in self._get_chunk(hold, *chunk, over)]

    def begin_write(
        self,
        keys: Sequence[ChunkKey],
        parents: Sequence[ChunkKey | None] | None = None,
        new: Sequence[int] | None = None,
        unnamed: UnnamedWrite | None = None,
    ) -> Write | None:
        """Take pages for all layers of those `keys` that are neither in the host tier nor on their way.

        Where memory cannot be freed for all of these, for as many as there is room for, from the first. What
        is known of `keys` is used by that, and stays here until the write ends: chunks are of no use without
        those before them.

        Args:
            keys: all chunks of a prompt, or of several, one prompt after the other.
            parents: the chunk before each, None for a prompt's first; without them `keys` are one prompt's.
            new: positions of those that may be written; all by default.
            unnamed: has the pages for these, and goes over into what is returned. Where None is returned, its
                pages stay the caller's.

        Returns None where there is nothing to store: all known, frozen, another engine's, or no room for a
        single one.
        """
        if self.frozen or not self._saves:
            return None
        parents = parents or parents_of(keys)
        parts = prompt_parts(keys, parents, self.lower.guards)
        with ExitStack() as undo:
            known = [chunk for chunk in self.host.pin(keys) if chunk is not None]
            undo.callback(self.host.unpin, known)
            new = range(len(keys)) if new is None else new
            wanted, pages, spare = self._take_pages(keys, new, None if unnamed is None else unnamed.pages)
            if not wanted:
                return None
            undo.pop_all()
        return Write(
            positions=np.array(wanted, np.int64),
            keys=[keys[i] for i in wanted],
            parents=[parents[i] for i in wanted],
            parts=[parts[i] for i in wanted],
            pages=pages,
            put=self.batched_put,
            unclaim=self._unclaim,
            release=self._pool.release,
            let_go=partial(self.host.unpin, known),
            spare=spare,
        )

    def begin_unnamed_write(self, first: ChunkKey, num_chunks: int) -> UnnamedWrite | None:
        """Take pages for all layers of a prompt's chunks of which only the first key is made; never waits.

        `begin_write` follows when all keys are made: their bytes can be on their way until then.

        Returns None where some of the chunks may be here or on their way, where nothing is to be stored, and
        where memory cannot be freed for all of them.
        """
        own, is_closed_to = self._own_host, self.frozen or not self._saves
        if own is None or is_closed_to or first in self._writing or not own.lacks_prompt(first):
            return None
        pages = self.allocate(self.num_layers * num_chunks)
        if pages is None:
            return None
        return UnnamedWrite(pages.reshape(self.num_layers, -1), self._pool.release)

    def batched_put(
        self,
        keys: Sequence[ChunkKey],
        chunks: Sequence[Chunk],
        parents: Sequence[ChunkKey | None],
        parts: Sequence[PromptPart],
    ) -> None:
        """Make complete chunks visible and have the lower tiers get them; takes over their pages.

        They are visible even if a tier raises, which is passed on; whatever raises, they can be stored again.
        `parents` has the chunk before each, `parts` what each is a part of.
        """
        with ExitStack() as after:
            after.callback(self._unclaim, keys)
            after.callback(self._insert, keys, chunks, parents)
            for key, chunk, part in zip(keys, chunks, parts, strict=True) if self.lower.guards else ():
                self.lower.keep(self.lower.guards, key, chunk, part)
        self._grow_ahead(self.num_layers * len(chunks))

    def allocate(self, num_pages: int) -> Int64s | None:
        """Take pages, evicting unpinned chunks if need be; None where that is not enough. Never waits."""
        pages = self._pool.allocate(num_pages)
        while pages is None and self.host.evict(self._pool.shortage(num_pages)):
            pages = self._pool.allocate(num_pages)
        return pages

    def lock_memory(self) -> None:
        """Have all host memory page-locked in the background, slab by slab; `close` ends it."""
        self._growth.submit(self._lock_next_slab)

    def wait_locked(self, timeout_s: float) -> bool:
        """Block until all that can be page-locked is; False if that takes over `timeout_s` seconds."""
        return self._growth.wait_idle(timeout_s)

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until lower tiers have all chunks, and whoever shares host memory can find them.

        False as LowerTiers.flush, or where the owner of host memory does not answer."""
        is_flushed = self.lower.flush(timeout_s)
        return self.host.is_settled() and is_flushed

    def unread_tiers(self) -> dict[str, float]:
        """Lower tiers that loads skip now, and until when by the clock; see Guard.unread_until."""
        now = self._clock()
        rests = {guard.name: guard.unread_until for guard in self.lower.guards}
        return {name: until for name, until in rests.items() if until > now}

    def read_times(self) -> dict[str, tuple[int, float]]:
        """For each lower tier, the bytes read so far, and the seconds in which it was being read."""
        return {guard.name: guard.read_time.totals() for guard in self.lower.guards}

    @property
    def tier_names(self) -> list[str]:
        """The names of all tiers, host memory first."""
        return [HOST, *(guard.name for guard in self.lower.guards)]

    def counts(self) -> dict[str, int]:
        """What was asked of each tier and how it answered, under the tier's name: numbers that only grow."""
        meters = [self._meter, *(guard.meter for guard in self.lower.guards)]
        by_tier = self._under_tiers([meter.totals() for meter in meters])
        return by_tier | {"chunks_evicted": self.host.evicted}

    def gauges(self) -> dict[str, int]:
        """What there is now, of each tier as far as is known; never waits for one."""
        held = {"chunks": len(self.host), "pins": self.host.pins, "writes_in_flight": self.writes_in_flight}
        host = {"used_bytes": self._pool.used_bytes, "capacity_bytes": self._pool.capacity_bytes}
        return self._under_tiers([host, *(guard.gauges() for guard in self.lower.guards)]) | held

    def totals(self) -> dict[str, int]:
        """Both. A gauge that a tier calls as a count is called is left out."""
        return self.gauges() | self.counts()

    def close(self, timeout_s: float) -> bool:
        """End the background work and drop every chunk that is not pinned; `timeout_s` is for all tiers.

        False if some of it did not end in time; another call waits for that.
        """
        deadline = time.monotonic() + timeout_s
        ended = self.lower.close(timeout_s)
        grown = self._growth.close(deadline - time.monotonic())
        if not grown:
            log.warning("host memory was still being page-locked at the end of close")
        self.host.close()
        return grown and ended

    def _under_tiers(self, numbers: Sequence[Mapping[str, int]]) -> dict[str, int]:
        by_tier = zip(self.tier_names, numbers, strict=True)
        return {f"{tier}_{name}": number for tier, own in by_tier for name, number in own.items()}

    def _take_pages(
        self, keys: Sequence[ChunkKey], new: Sequence[int], taken: Int64s | None
    ) -> tuple[list[int], Int64s, Int64s]:
        """Claim what is to be written of `new`: the positions, and pages for them, int64 (layers, chunks).

        They are those of `taken`, which are for all of `new`, and the third value those left over.
        """
        wanted = self._claim(keys, new)
        with ExitStack() as undo:
            undo.callback(self._unclaim, [keys[i] for i in wanted])
            if taken is None:
                pages = self._as_many_pages(len(wanted)).reshape(self.num_layers, -1)
                spare = pages[:, :0]
            else:
                needed = np.isin(new, wanted)
                pages, spare = taken[:, needed], taken[:, ~needed]
            undo.pop_all()
        wanted, refused = wanted[: pages.shape[1]], wanted[pages.shape[1] :]
        if refused:
            self._refuse([keys[i] for i in refused])
        return wanted, pages, spare

    def _as_many_pages(self, num_chunks: int) -> Int64s:
        """Pages for up to `num_chunks` chunks, as many as can be had."""
        while num_chunks > 0:
            pages = self.allocate(self.num_layers * num_chunks)
            if pages is not None:
                return pages
            room = self._pool.available + self.host.evictable()
            num_chunks = min(num_chunks - 1, room // self.num_layers)
        return np.zeros(0, np.int64)

    def _refuse(self, keys: Sequence[ChunkKey]) -> None:
        self.lower.settle()  # what is evicted next must have been written
        self._unclaim(keys)
        self._counters.add("stores_refused")
        self._counters.add("chunks_refused", len(keys))
        self._throttle.warn("no room for %d chunks in host memory: not stored", len(keys))
        # Where nothing could be page-locked, no store would ever end and have it tried again.
        self._grow_ahead(len(keys) * self.num_layers)

    def _lock_next_slab(self) -> None:
        # A job for each slab: the next one is not begun once the threads are to end.
        if self._pool.lock_slab():
            self._growth.submit(self._lock_next_slab)

    def _grow_ahead(self, num_pages: int) -> None:
        # The next store of this size is not to wait for memory to be page-locked.
        if self._pool.num_pages < self._pool.max_pages:
            self._growth.submit(partial(self._pool.grow_ahead, num_pages))

    def _get_layer(self, hold: Hold, layer: int) -> Future[LayerPages]:
        fetch = LayerFetch(hold, layer, len(hold.lower))
        for tier, keys, positions in hold.lower:
            pages = self.allocate(len(positions))
            if pages is None:
                self._lack_memory(len(positions))
                fetch.lacks_memory(positions)
            else:
                fetch.watch(tier.get(keys, layer, pages), positions, pages)
        return fetch.future

    def _get_chunk(
        self, hold: Hold, guard: Guard, key: ChunkKey, position: int, over: Callable[[], object]
    ) -> list[Future[Int64s]]:
        pages = self.allocate(self.num_layers)
        if pages is None:
            self._lack_memory(self.num_layers)
            return []
        unasked, calls = pages, []
        try:
            for layers in parts_of_chunk(self.num_layers, self._pool.page_stride):
                call = guard.get_layers([LayerKey(key, layer) for layer in layers.tolist()], pages[layers])
                unasked = unasked[len(layers) :]
                call.add_done_callback(partial(take_over, hold, layers, position, pages[layers], over))
                calls.append(call)
        finally:
            if len(unasked):  # a call could not be made: the pages of those made are the hold's
                self._pool.release(unasked)
        return calls

    def _lack_memory(self, num_pages: int) -> None:
        self.lower.settle()  # what has been written can go for the next load
        self._counters.add("loads_without_memory", num_pages)
        self._grow_ahead(num_pages)

    def _promote(self, part: PromptPart, found: Sequence[Found], chunks: Sequence[Chunk]) -> None:
        if self.frozen:
            for chunk in chunks:
                self._pool.release(chunk.pages)
            return
        try:
            for item, chunk in zip(found, chunks, strict=True):
                self.lower.keep(self.lower.nearer_than(item.tier), item.key, chunk, part)
        finally:
            self._insert([item.key for item in found], chunks, [item.parent for item in found])

    def _insert(
        self, keys: Sequence[ChunkKey], chunks: Sequence[Chunk], parents: Sequence[ChunkKey | None]
    ) -> None:
        if self._keep_in_host:
            self.host.insert(keys, chunks, parents)
        else:
            for chunk in chunks:
                self._pool.release(chunk.pages)

    def _note_found(self, found: Sequence[Found], length: int) -> None:
        """Count hits, and misses of each tier that was asked for what comes at the end of the prefix."""
        held = found[:length]
        in_host = sum([item.chunk is not None for item in held])
        self._meter.note_found(in_host, len(found) - in_host)
        asked = len(found) - in_host
        for guard in self.lower.guards:
            hits = sum(item.tier is guard for item in held)
            guard.meter.note_found(hits, asked - hits)
            asked -= hits

    def _claim(self, keys: Sequence[ChunkKey], new: Iterable[int]) -> list[int]:
        with self._lock:
            known = self.host.contains(keys)
            wanted = [i for i in new if not known[i] and keys[i] not in self._writing]
            wanted = _distinct(keys, wanted)
            self._writing.update([keys[i] for i in wanted])
        return wanted

    def _unclaim(self, keys: Sequence[ChunkKey]) -> None:
        # No lock: a finalizer may come here on any thread. One call of a set is one step.
        self._writing.difference_update(keys)


def _prefix_length(found: list[bool]) -> int:
    return found.index(False) if False in found else len(found)


def _distinct(keys: Sequence[ChunkKey], positions: Sequence[int]) -> list[int]:
    """The positions of each key's first occurrence: two requests of a batch may share a prefix."""
    return sorted({keys[i]: i for i in reversed(positions)}.values())
