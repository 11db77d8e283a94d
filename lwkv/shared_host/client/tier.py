"""The host tier of an engine whose host memory is a node's: the owner has the index."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from lwkv.keys import HASH_BYTES, ChunkKey
from lwkv.shared_host.client.pool import NodePool
from lwkv.shared_host.client.promises import Promised
from lwkv.shared_host.client.session import Pinned, Session
from lwkv.shared_host.protocol import Op, name_of
from lwkv.storage.host_tier import Chunk, Watcher
from lwkv.storage.prefix_order import leading, parents_of


class NodeTier:
    """Complete chunks in a node's memory, with the contract of HostTier. Thread-safe.

    Every chunk of the node is here, whoever stored it. Where the owner does not answer in time none is, and
    what is inserted is lost. The owner evicts when pages are allocated: `evict` has nothing to do.
    """

    def __init__(self, pool: NodePool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._closed = False
        self._pins = 0
        self._reported: set[ChunkKey] = set()
        self._namespaces: dict[bytes, str] = {}
        self.watcher: Watcher | None = None
        pool.on_evicted, pool.on_lost = self._note_evicted, self._note_lost

    def __len__(self) -> int:
        """Chunks of all the node, as the owner said last."""
        session = self._pool.session
        return 0 if session is None else session.state.chunks

    @property
    def name(self) -> str:
        """By which chunks can be promised to this engine."""
        return self._pool.name

    @property
    def pins(self) -> int:
        """Of this engine's."""
        return self._pins

    @property
    def evicted(self) -> int:
        """Chunks of all the node, as the owner said last."""
        session = self._pool.session
        return 0 if session is None else session.state.evicted

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        session = self._pool.session
        there = session.has(self._pool.num_pages, keys) if session is not None and keys else None
        return there or [False] * len(keys)

    def announce(self) -> None:
        session = self._pool.session
        if session is not None and not self._closed:
            session.announce()

    def pin(self, keys: Sequence[ChunkKey]) -> list[Chunk | None]:
        return self._pin(keys, Op.PIN)

    def pin_prefix(self, keys: Sequence[ChunkKey]) -> list[Chunk]:
        found = self._pin(keys, Op.PIN_PREFIX)
        chunks = leading(found)
        self.unpin([chunk for chunk in found[len(chunks) :] if chunk is not None])
        return chunks

    def _pin(self, keys: Sequence[ChunkKey], op: Op) -> list[Chunk | None]:
        session = self._pool.session
        if self._closed or session is None or not keys:
            return [None] * len(keys)
        pinned = session.pin(self._pool.num_pages, keys, op)
        chunks = None if pinned is None else self._adopt(session, pinned)
        return chunks or [None] * len(keys)

    def take_over(self, promised: Promised) -> list[Chunk | None] | None:
        """Have chunks pinned that the owner holds for this engine because another process asked it to.

        No message is sent. None where the promise is not this engine's at its present owner.
        """
        session = self._pool.session
        if session is None or (session.welcome.owner, session.welcome.client) != promised[:2]:
            return None
        return self._adopt(session, promised.pinned)

    def _adopt(self, session: Session, pinned: Pinned) -> list[Chunk | None] | None:
        pages = self._pool.adopt(session, pinned)
        if pages is None:
            return None
        chunks = [None if own is None else Chunk(own) for own in pages]
        self._count_pins(sum(chunk is not None for chunk in chunks))
        return chunks

    def use(self, keys: Sequence[ChunkKey]) -> None:
        session = self._pool.session
        if session is not None:
            session.use(keys)

    def unpin(self, chunks: Sequence[Chunk]) -> None:
        if chunks:
            self._count_pins(-len(chunks))
            self._release(chunks)

    def insert(
        self,
        keys: Sequence[ChunkKey],
        chunks: Sequence[Chunk],
        parents: Sequence[ChunkKey | None] | None = None,
    ) -> None:
        session = self._pool.session
        if session is not None and keys and not self._closed:
            self._namespaces |= {name_of(key.namespace): key.namespace for key in keys}
            self._commit(session, keys, chunks, parents or parents_of(keys))
        self._release(chunks)

    def is_settled(self) -> bool:
        """Whether the owner has all that was inserted, so that every engine can find it; asks the owner."""
        session = self._pool.session
        return session is None or session.has(0, ()) is not None or session.connection.is_lost

    def evictable(self) -> int:
        """0: what can be evicted is part of the pool's `available`."""
        return 0

    def evict(self, num_pages: int) -> bool:
        return num_pages <= 0

    def close(self) -> None:
        """Keep nothing from now on; what was kept is the node's."""
        self._closed = True

    def _commit(
        self,
        session: Session,
        keys: Sequence[ChunkKey],
        chunks: Sequence[Chunk],
        parents: Sequence[ChunkKey | None],
    ) -> None:
        pages = np.concatenate([chunk.pages for chunk in chunks])
        numbers = self._pool.own_numbers(session, pages)
        if numbers is None:  # their owner is gone
            return
        first = int(pages[0]) - int(numbers[0])
        spills = {int(numbers[i]): spill - first for i, spill in self._pool.spill_of(pages).items()}
        session.commit(keys, parents, [len(chunk.pages) for chunk in chunks], numbers, spills)
        with self._lock:
            if self.watcher is not None:
                self._reported.update(keys)
                self.watcher.kept(keys)

    def _note_evicted(self, keys: Sequence[bytes]) -> None:
        """Let the watcher know of those chunks it knows, by their packed keys."""
        known = [(self._namespaces.get(key[:HASH_BYTES]), key[HASH_BYTES:]) for key in keys]
        self._drop([ChunkKey(name, digest) for name, digest in known if name is not None])

    def _note_lost(self) -> None:
        self._drop(list(self._reported))

    def _drop(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            gone = [key for key in keys if key in self._reported]
            self._reported.difference_update(gone)
            if gone and self.watcher is not None:
                self.watcher.dropped(gone)

    def _release(self, chunks: Sequence[Chunk]) -> None:
        """Drop a reference to the pages of each; a chunk may be named twice, and has two then."""
        if not chunks:
            return
        pages, counts = np.unique(np.concatenate([chunk.pages for chunk in chunks]), return_counts=True)
        for number in range(int(counts.max())):
            self._pool.release(pages[counts > number])

    def _count_pins(self, more: int) -> None:
        with self._lock:
            self._pins += more
