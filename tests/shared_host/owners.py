"""An owner of host memory on a thread of the test's own process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lwkv.platforms import Platform
from lwkv.platforms.cpu import CPU
from lwkv.shared_host.client.connecting import connect
from lwkv.shared_host.client.keeper import Waker
from lwkv.shared_host.client.pool import NodePool
from lwkv.shared_host.client.session import Session
from lwkv.shared_host.client.tier import NodeTier
from lwkv.shared_host.greeting import Hello
from lwkv.shared_host.memfd import make_memory
from lwkv.shared_host.owner.address import Address
from lwkv.shared_host.owner.index import NodeIndex
from lwkv.shared_host.owner.server import Memory, Server
from lwkv.storage.host_tier import HostChunks
from lwkv.telemetry.counters import Counters

LONG_S = 30.0
"""Seconds that an owner may take in tests that are not about time."""


class OwnerThread:
    """A server on a thread; `end` is its clean end, and it is seen by clients as any other."""

    def __init__(self, path: Path, num_bytes: int, slab_bytes: int = 6 * 4096) -> None:
        self.address = Address(str(path))
        self.descriptor = make_memory(num_bytes)
        self.server = Server(self.address, Memory(self.descriptor, num_bytes), slab_bytes)
        self._thread = threading.Thread(target=self.server.serve)
        self._thread.start()

    def end(self) -> None:
        self.server.stop()
        self._thread.join()
        self.address.close()
        os.close(self.descriptor)


@contextmanager
def owner_at(path: Path, num_pages: int, stride: int = 4096) -> Iterator[OwnerThread]:
    owner = OwnerThread(path, num_pages * stride, 6 * stride)
    try:
        yield owner
    finally:
        owner.end()


def session_at(path: Path | str, stride: int = 4096, timeout_s: float = LONG_S) -> Session:
    return connect(str(path), Hello(stride), timeout_s, Waker())


@contextmanager
def pool_at(path: Path, page_bytes: int, platform: Platform | None = None) -> Iterator[NodePool]:
    """A pool without a keeper: notes are sent with the next request."""
    session = session_at(path)
    try:
        yield NodePool(platform or CPU(), page_bytes, session, Counters(), locks_ahead=False)
    finally:
        session.connection.close()
        session.connection.release()


class WatchedPool(NodePool):
    """Counts references at the owner, of all clients and of the index."""

    index: NodeIndex

    @property
    def pages_in_use(self) -> int:
        self.settle()
        return self.index.state().pages_in_use

    @property
    def references(self) -> int:
        self.settle()
        return self.index.pages.references

    def settle(self) -> None:
        """Have the owner take all notes."""
        assert self.session is not None
        assert self.session.has(0, ()) is not None


class WatchedTier(NodeTier):
    """Looks into the owner where HostTier looks into itself; it evicts nothing, as any client."""

    def __init__(self, pool: WatchedPool) -> None:
        super().__init__(pool)
        self.pool = pool

    def __len__(self) -> int:
        self.pool.settle()
        return len(self.pool.index.tier)

    @property
    def evicted(self) -> int:
        self.pool.settle()
        return self.pool.index.tier.evicted


def evictable(host: HostChunks) -> int:
    """How many pages `evict` could free."""
    if not isinstance(host, WatchedTier):
        return host.evictable()
    host.pool.settle()
    return host.pool.index.tier.evictable()


def evict(host: HostChunks, num_pages: int) -> bool:
    """Have so many pages freed; by an owner, of whom all that is free is taken, and as many more."""
    if not isinstance(host, WatchedTier) or not num_pages:
        return host.evict(num_pages)
    pool = host.pool
    pool.settle()
    pages = pool.allocate(pool.index.pages.num_pages - pool.index.state().pages_in_use + num_pages)
    if pages is not None:
        pool.release(pages)
    pool.settle()
    return pages is not None


@contextmanager
def watched_node(owner: OwnerThread, page_bytes: int) -> Iterator[tuple[WatchedTier, WatchedPool]]:
    """A client of `owner` without a keeper: notes are sent with the next request."""
    session = session_at(owner.address.path)
    pool = WatchedPool(CPU(), page_bytes, session, Counters(), locks_ahead=False)
    (pool.index,) = owner.server._indexes.values()
    yield WatchedTier(pool), pool
    session.connection.close()
    session.connection.release()
