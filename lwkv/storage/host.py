"""The host tier: which chunks have all their layers in the host pool."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lwkv.keys import ChunkKey
from lwkv.platforms.protocol import Int64s
from lwkv.pool import HostPool


@dataclass(slots=True, eq=False)
class Chunk:
    """A complete chunk: one page a layer, int64 (layers,). It owns one reference to each page."""

    pages: Int64s
    num_tokens: int
    pins: int = 0


class Watcher(Protocol):
    """Is told what becomes visible and what goes, in order. Called under the tier's lock: it must not block."""

    def kept(self, keys: Sequence[ChunkKey]) -> None: ...

    def dropped(self, keys: Sequence[ChunkKey]) -> None: ...


class HostTier:
    """Complete chunks in the host pool, least recently used first.

    A chunk enters with all its layers and leaves with all its layers, so that it is visible whole or not at
    all. A pinned chunk is never evicted, nor one whose pages a lower tier still reads. Thread-safe.
    """

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._chunks: OrderedDict[ChunkKey, Chunk] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False
        self.evicted = 0
        self.watcher: Watcher | None = None

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def pins(self) -> int:
        with self._lock:
            return sum(chunk.pins for chunk in self._chunks.values())

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        with self._lock:
            return [key in self._chunks for key in keys]

    def pin(self, keys: Sequence[ChunkKey]) -> list[Chunk | None]:
        """Pin every chunk that is here, in the order of `keys`; `unpin` ends it. None after `close`."""
        with self._lock:
            if self._closed:
                return [None] * len(keys)
            found = [self._chunks.get(key) for key in keys]
            # Deep chunks are of no use without those before them, so they are to go first.
            for key, chunk in zip(reversed(keys), reversed(found), strict=True):
                if chunk is not None:
                    chunk.pins += 1
                    self._chunks.move_to_end(key)
            return found

    def unpin(self, chunks: Sequence[Chunk]) -> None:
        with self._lock:
            for chunk in chunks:
                chunk.pins -= 1
            dropped = self._take_unpinned() if self._closed else []
        self._release(dropped)

    def insert(self, keys: Sequence[ChunkKey], chunks: Sequence[Chunk]) -> None:
        """Make complete chunks visible, taking over the caller's page references; what is here stays."""
        surplus: list[Int64s] = []
        with self._lock:
            for key, chunk in zip(reversed(keys), reversed(chunks), strict=True):
                if self._closed or key in self._chunks:
                    surplus.append(chunk.pages)
                else:
                    self._chunks[key] = chunk
            if self.watcher is not None:
                self.watcher.kept(keys)
        self._release(surplus)

    def evictable(self) -> int:
        """How many pages `evict` could free; looks at every chunk."""
        with self._lock:
            return sum(len(chunk.pages) for chunk in self._chunks.values() if self._may_go(chunk))

    def evict(self, num_pages: int) -> bool:
        """Free `num_pages` pages or more, least recently used chunks first; none where too few can go."""
        victims: list[ChunkKey] = []
        found = 0
        with self._lock:
            for key, chunk in self._chunks.items():
                if found >= num_pages:
                    break
                if self._may_go(chunk):
                    victims.append(key)
                    found += len(chunk.pages)
            if found < num_pages:
                return False
            dropped = [self._chunks.pop(key).pages for key in victims]
            self.evicted += len(dropped)
            if self.watcher is not None:
                self.watcher.dropped(victims)
        self._release(dropped)
        return True

    def close(self) -> None:
        """Drop every chunk, a pinned one with its last pin, and keep none from now on."""
        with self._lock:
            self._closed = True
            dropped = self._take_unpinned()
        self._release(dropped)

    def _may_go(self, chunk: Chunk) -> bool:
        return not chunk.pins and not self._pool.is_shared(chunk.pages)

    def _take_unpinned(self) -> list[Int64s]:
        unpinned = [key for key, chunk in self._chunks.items() if not chunk.pins]
        return [self._chunks.pop(key).pages for key in unpinned]

    def _release(self, pages: Sequence[Int64s]) -> None:
        if pages:
            self._pool.release(np.concatenate(pages))
