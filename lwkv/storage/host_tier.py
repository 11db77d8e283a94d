"""The host tier: which chunks have all their layers in the host pool."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lwkv.keys import ChunkKey
from lwkv.platforms.protocol import Int64s
from lwkv.storage.prefix_order import PrefixOrder, leading, parents_of

CHUNKS_AT_A_TIME = 32


@dataclass(slots=True, eq=False)
class Chunk:
    """A complete chunk: one page a layer, int64 (layers,). It owns one reference to each page."""

    pages: Int64s
    pins: int = 0


class Watcher(Protocol):
    """Called for what becomes visible and what goes, in order, under the tier's lock: it must not block."""

    def kept(self, keys: Sequence[ChunkKey]) -> None: ...

    def dropped(self, keys: Sequence[ChunkKey]) -> None: ...


class PageCounts(Protocol):
    """What the tier asks of the pages; see HostPool."""

    def shared(self, pages: Int64s) -> npt.NDArray[np.bool_]: ...

    def release(self, pages: Int64s) -> None: ...


class HostChunks(Protocol):
    """A host tier: HostTier, or that of a node (lwkv.shared_host.client.tier) with the same contract."""

    watcher: Watcher | None

    def __len__(self) -> int: ...

    @property
    def pins(self) -> int: ...

    @property
    def evicted(self) -> int: ...

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]: ...

    def announce(self) -> None: ...

    def pin(self, keys: Sequence[ChunkKey]) -> list[Chunk | None]: ...

    def pin_prefix(self, keys: Sequence[ChunkKey]) -> list[Chunk]: ...

    def use(self, keys: Sequence[ChunkKey]) -> None: ...

    def unpin(self, chunks: Sequence[Chunk]) -> None: ...

    def insert(
        self,
        keys: Sequence[ChunkKey],
        chunks: Sequence[Chunk],
        parents: Sequence[ChunkKey | None] | None = None,
    ) -> None: ...

    def is_settled(self) -> bool: ...

    def evictable(self) -> int: ...

    def evict(self, num_pages: int) -> bool: ...

    def close(self) -> None: ...


class HostTier:
    """Complete chunks in the host pool. They are evicted in PrefixOrder: a prompt's last chunk first.

    A chunk enters with all its layers and leaves with all its layers, so that it is visible whole or not at
    all. A pinned chunk is never evicted, nor one whose pages a lower tier still reads. Thread-safe.
    """

    def __init__(self, pool: PageCounts) -> None:
        self._pool = pool
        self._chunks: dict[ChunkKey, Chunk] = {}
        self._order: PrefixOrder[ChunkKey] = PrefixOrder()
        self._lock = threading.Lock()
        self._closed = False
        self._pins = 0
        self.evicted = 0
        self.watcher: Watcher | None = None

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def pins(self) -> int:
        """Of all chunks together; metrics ask for it in every step."""
        return self._pins

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        with self._lock:
            return [key in self._chunks for key in keys]

    def announce(self) -> None:
        """Note that chunks will be pinned within a millisecond. Nothing to do here: nobody has to wake up."""

    def find(self, keys: Sequence[ChunkKey]) -> list[Chunk | None]:
        """The chunks that are here, neither pinned nor used. The caller must share their pages before it
        evicts any."""
        with self._lock:
            return list(map(self._chunks.get, keys))

    def lacks_prompt(self, first: ChunkKey) -> bool:
        """Whether no chunk is here, as far as is known, of any prompt that begins with `first`."""
        with self._lock:
            return first not in self._chunks and not self._order.has_behind(first)

    def pin(self, keys: Sequence[ChunkKey]) -> list[Chunk | None]:
        """Pin and use every chunk that is here, in the order of `keys`; `unpin` ends it. None after `close`.

        `keys` are those of a prompt's chunks in their order, or of several, one prompt after the other.
        """
        with self._lock:
            if self._closed:
                return [None] * len(keys)
            found = [self._chunks.get(key) for key in keys]
            for chunk in found:
                if chunk is not None:
                    chunk.pins += 1
                    self._pins += 1
            self._order.use(keys)
            return found

    def pin_prefix(self, keys: Sequence[ChunkKey]) -> list[Chunk]:
        """Pin the leading ones of `keys`, a prompt's chunks in their order, that are here; `unpin` ends it.

        They do not count as used before `use` is called. None after `close`.
        """
        with self._lock:
            if self._closed:
                return []
            chunks = leading(list(map(self._chunks.get, keys)))
            for chunk in chunks:
                chunk.pins += 1
            self._pins += len(chunks)
            return chunks

    def use(self, keys: Sequence[ChunkKey]) -> None:
        """Note that those of a prompt's chunks that are here are used; `keys` in their order."""
        with self._lock:
            self._order.use(keys)

    def unpin(self, chunks: Sequence[Chunk]) -> None:
        with self._lock:
            for chunk in chunks:
                chunk.pins -= 1
                self._pins -= 1
            dropped = self._take_unpinned() if self._closed else []
        self._release(dropped)

    def insert(
        self,
        keys: Sequence[ChunkKey],
        chunks: Sequence[Chunk],
        parents: Sequence[ChunkKey | None] | None = None,
    ) -> None:
        """Make complete chunks visible, taking over the caller's page references; what is here stays.

        Args:
            parents: the chunk before each, None for a prompt's first; without them `keys` are all chunks of
                one prompt.
        """
        surplus: list[Int64s] = []
        new: list[ChunkKey] = []
        parents_of_new: list[ChunkKey | None] = []
        with self._lock:
            for key, chunk, parent in zip(keys, chunks, parents or parents_of(keys), strict=True):
                if self._closed or key in self._chunks:
                    surplus.append(chunk.pages)
                else:
                    self._chunks[key] = chunk
                    new.append(key)
                    parents_of_new.append(parent)
            self._order.add_all(new, parents_of_new)
            self._order.use(keys)
            if self.watcher is not None:
                self.watcher.kept(keys)
        self._release(surplus)

    def is_settled(self) -> bool:
        """Whether all that was inserted can be found."""
        return True

    def evictable(self) -> int:
        """How many pages `evict` could free; looks at every chunk."""
        with self._lock:
            return sum(len(self._chunks[key].pages) for some in self._evictable() for key in some)

    def evict(self, num_pages: int) -> bool:
        """Free `num_pages` pages or more, in PrefixOrder; none where too few can go."""
        with self._lock:
            victims = self._oldest(num_pages)
            if victims is None:
                return False
            dropped = self._take(victims)
            self.evicted += len(dropped)
            if self.watcher is not None:
                self.watcher.dropped(victims)
        self._release(dropped)
        return True

    def pages_of(self, key: ChunkKey) -> Int64s:
        """The pages of a chunk that is here, int64 (layers,)."""
        return self._chunks[key].pages

    def remove(self, keys: Sequence[ChunkKey]) -> bool:
        """Evict these chunks; none of them, and False, where one is pinned or its pages are read."""
        with self._lock:
            chunks = [self._chunks[key] for key in keys]
            if any(chunk.pins for chunk in chunks):
                return False
            if chunks and self._pool.shared(np.concatenate([chunk.pages for chunk in chunks])).any():
                return False
            dropped = self._take(keys)
            self.evicted += len(dropped)
            if self.watcher is not None:
                self.watcher.dropped(keys)
        self._release(dropped)
        return True

    def close(self) -> None:
        """Drop every chunk, a pinned one with its last pin, and keep none from now on."""
        with self._lock:
            self._closed = True
            dropped = self._take_unpinned()
        self._release(dropped)

    def _oldest(self, num_pages: int) -> list[ChunkKey] | None:
        """The chunks that are to go for `num_pages` pages; None where all that can go have fewer."""
        victims: list[ChunkKey] = []
        for some in self._evictable():
            for key in some:
                if num_pages <= 0:
                    return victims
                victims.append(key)
                num_pages -= len(self._chunks[key].pages)
        return victims if num_pages <= 0 else None

    def _evictable(self) -> Iterator[Sequence[ChunkKey]]:
        """What can go, in order, some chunks at a time."""
        chunks = self._chunks
        unpinned = (key for key in self._order if not chunks[key].pins)
        # Many at a time: the pool is asked, and its lock taken, once for all of them.
        while some := list(islice(unpinned, CHUNKS_AT_A_TIME)):
            pages = [chunks[key].pages for key in some]
            shared = self._pool.shared(np.concatenate(pages))
            if not shared.any():
                yield some
                continue
            starts = [0, *accumulate(map(len, pages[:-1]))]
            is_read = np.logical_or.reduceat(shared, starts)
            yield [key for key, read in zip(some, is_read, strict=True) if not read]

    def _take_unpinned(self) -> list[Int64s]:
        return self._take([key for key, chunk in self._chunks.items() if not chunk.pins])

    def _take(self, keys: Sequence[ChunkKey]) -> list[Int64s]:
        """Remove chunks; the pages of each."""
        self._order.remove_all(keys)
        return [self._chunks.pop(key).pages for key in keys]

    def _release(self, pages: Sequence[Int64s]) -> None:
        if pages:
            self._pool.release(np.concatenate(pages))
