"""How fast a lower tier is read, measured before a request waits for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np

from lwkv.keys import ChunkKey, LayerKey
from lwkv.platforms.protocol import Int64s
from lwkv.pool.host_pool import HostPool
from lwkv.storage.chunk_parts import parts_of_chunk
from lwkv.storage.guard import Guard
from lwkv.storage.host_tier import Chunk

NUM_CHUNKS = 4
"""Chunks that are read: as many as show the speed of several reads beside each other."""

MOST_WRITTEN = 16
"""Chunks that a tier has got after which it is read though it is still being written."""


class WrittenChunk(NamedTuple):
    """A chunk that a tier has got, and how many pages it has."""

    key: ChunkKey
    num_pages: int


class ReadBack:
    """Reads some of the first chunks back that a tier gets, once; `Guard.read_time` has how long it took.

    Without that the first request whose chunks are in a new tier would wait to see how fast it is. They go
    to free pages of host memory, which are given back at once: nothing is evicted for them. A tier that was
    read before is not read for this. Thread-safe; no method waits for the tier.
    """

    def __init__(self, guard: Guard, pool: HostPool) -> None:
        self._guard = guard
        self._pool = pool
        self._last: deque[WrittenChunk] = deque(maxlen=NUM_CHUNKS)
        self._num_written = 0
        self._is_over = False
        self._lock = threading.Lock()

    def note_written(self, key: ChunkKey, chunk: Chunk) -> None:
        """Note that the tier has got a chunk, and read some back if it is time for that."""
        if self._is_over or self._pool.spill_of(chunk.pages):  # a tier does not keep chunks that have spilled
            return
        with self._lock:
            self._last.append(WrittenChunk(key, len(chunk.pages)))
            self._num_written += 1
            chunks = self._take_if_due()
        if chunks and not self._was_read():
            self._read(chunks)

    def _take_if_due(self) -> Sequence[WrittenChunk]:
        """The chunks to read, once; none where it is not time."""
        is_written = len(self._last) == NUM_CHUNKS and not self._guard.is_writing
        if self._is_over or not (is_written or self._num_written >= MOST_WRITTEN):
            return ()
        self._is_over = True
        return list(self._last)

    def _was_read(self) -> bool:
        num_bytes, _ = self._guard.read_time.totals()
        return num_bytes > 0

    def _read(self, chunks: Sequence[WrittenChunk]) -> None:
        num_pages = sum(chunk.num_pages for chunk in chunks)
        has_room = num_pages <= self._pool.available
        unasked = self._pool.allocate(num_pages) if has_room else None
        if unasked is None:
            self._is_over = False  # the next chunk's turn
            return
        try:
            for key, num_layers in chunks:
                for layers in parts_of_chunk(num_layers, self._pool.page_stride):
                    pages, rest = np.split(unasked, [len(layers)])
                    call = self._guard.get_layers([LayerKey(key, layer) for layer in layers.tolist()], pages)
                    unasked = rest
                    call.add_done_callback(partial(self._give_back, pages))
        finally:
            if len(unasked):  # a call could not be made: the pages of those made are given back by them
                self._pool.release(unasked)

    def _give_back(self, pages: Int64s, call: Future[Int64s]) -> None:
        self._pool.release(pages)
