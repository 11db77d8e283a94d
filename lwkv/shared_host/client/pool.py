"""Pages of a node's memory, as an engine has them: the owner hands them out, the engine counts its use."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from lwkv.background.workers import Workers
from lwkv.errors import ConfigError
from lwkv.platforms import Int64s, Platform
from lwkv.platforms.host_memory import no_memory
from lwkv.pool.host_pool import HostPool, page_stride
from lwkv.pool.page_refcounts import PageRefcounts
from lwkv.shared_host.client.session import Pinned, Session
from lwkv.shared_host.mapping import give_by_threads
from lwkv.telemetry.counters import Counters

log = logging.getLogger(__name__)

MAPPING_THREADS = min(8, os.cpu_count() or 1)


class _Left(NamedTuple):
    """Pages [first, end) of an owner that is gone, some of which are in use."""

    first: int
    end: int


class NodePool(HostPool):
    """A HostPool whose memory belongs to the owner of a node. Its methods are those of HostPool.

    `allocate` asks the owner, which evicts chunks for it, and waits for no longer than a request may take.
    A page is held at the owner as long as this process has a reference to it. When an owner is gone its
    pages stay mapped until the last reference ends; pages of the next one have other numbers.

    Memory is page-locked slab by slab with `lock_slab`; the owner gives no page of a slab that is not.

    Args:
        session: the first owner.
        locks_ahead: whether memory is page-locked by `lock_slab` alone; if not, all of it is at once. Of the
            owners that follow it is done in the background, once it was done of the first.
        use_device: called by the thread that does that, before all else.
        name: as each owner has it, for whoever has chunks promised to this pool; empty where nobody has.

    Attributes:
        session: the owner, if there is one.
        on_evicted: called with the packed keys of chunks that the owner evicted; it must not block.
        on_lost: called when the owner is gone.
        on_end: called when the pool is closed and no page is in use any more.

    Raises:
        ConfigError: the platform cannot page-lock memory that it did not make; the owner has not one page.
    """

    def __init__(
        self,
        platform: Platform,
        page_bytes: int,
        session: Session,
        counters: Counters,
        locks_ahead: bool,
        use_device: Callable[[], object] | None = None,
        name: str = "",
    ) -> None:
        if not platform.features.host_register:
            raise ConfigError(
                f"host_memory: the platform {platform.name} cannot page-lock the memory of another process; "
                "leave host_memory out"
            )
        stride, welcome = page_stride(page_bytes), session.welcome
        size, slab_bytes = welcome.num_pages * stride, welcome.span * stride
        super().__init__(platform, page_bytes, size, slab_bytes, counters, on_demand=False)
        # As the owner has it, also where its memory is smaller than a slab: the next one's may be larger.
        self.slabs = self.slabs._replace(span=welcome.span)
        self._counts = PageRefcounts(welcome.span)
        self._locks_ahead = locks_ahead
        self._locking = Workers("host-memory-lock", 1, use_device)
        self._is_locking = not locks_ahead
        self._first = 0
        self._held = np.zeros(0, np.int32)
        self._left: list[_Left] = []
        self._dropped: list[torch.Tensor] = []
        self._stuck: list[torch.Tensor] = []
        self._room = 0
        self._has_ended = False
        self.name = name
        self.session: Session | None = None
        self.on_evicted: Callable[[list[bytes]], object] | None = None
        self.on_lost: Callable[[], object] | None = None
        self.on_end: Callable[[], object] | None = None
        self.attach(session)

    def attach(self, session: Session) -> None:
        """Have pages of this owner from now on.

        Raises ConfigError for one whose slabs have another size, and ends its connection.
        """
        if session.welcome.span != self.slabs.span:
            session.connection.close()
            session.connection.release()
            raise ConfigError(
                f"host_memory: the new owner has {session.welcome.span} pages in a slab, the last one had "
                f"{self.slabs.span}: start it with the same version of lwkv"
            )
        with self._lock:
            self._first = len(self._held)
            self.max_pages = session.welcome.num_pages
            session.watcher = self._note_evicted
            self.session = session
        if not self._locks_ahead:
            self._lock_all()
        elif self._is_locking:
            self._locking.submit(self._lock_all)

    def detach(self) -> None:
        """The owner is gone: hand out nothing, and keep mapped what is in use."""
        with self._lock:
            self.session = None
            self._left.append(_Left(self._first, len(self._held)))
            self._first, self.num_pages = len(self._held), 0
            self._drop_left()
        if self.on_lost is not None:
            self.on_lost()

    def require_chunk(self, num_layers: int) -> None:
        if self.max_pages < num_layers:
            raise ConfigError(
                f"host_memory: the owner has {self.max_pages} pages of {self.page_stride} bytes, but one "
                f"chunk of {num_layers} layers needs {num_layers}: give it a larger --size, or lower "
                "chunk_size"
            )

    @property
    def pages_in_use(self) -> int:
        """Of all the node's, as the owner said last."""
        session = self.session  # which may be gone at any time
        return 0 if session is None else session.state.pages_in_use

    @property
    def available(self) -> int:
        """Pages that the owner can give, as it said last; where it gave none, with what it could evict."""
        return 0 if self._closed else self._room

    def allocate(self, count: int) -> Int64s | None:
        session = self.session
        if self._closed or session is None:
            self._room = 0
            return None
        if count <= 0:
            return np.zeros(0, np.int64)
        pages, room = session.reserve(self.num_pages, count)
        self._room = room if pages is None else self.max_pages - session.state.pages_in_use
        return None if pages is None else self._take_over(session, pages)

    def shortage(self, count: int) -> int:
        return self.max_pages + 1

    def lock_slab(self) -> bool:
        self._is_locking = True
        return self._grow_for(self.max_pages)

    def grow_ahead(self, count: int) -> None:
        """Do nothing: `lock_slab` is called until all is page-locked."""

    def release(self, pages: Int64s) -> None:
        with self._lock:
            self._counts.release(pages)
            unused = self._counts.unused(pages)
            spill = self._spills.take(unused)
            self._counts.release(spill)
            self._give_back(np.concatenate([unused.ravel(), spill]))
            self._drop_left()
            self._end()

    def drop_spill(self, pages: Int64s) -> None:
        with self._lock:
            spill = self._spills.take(pages)
            self._counts.release(spill)
            self._give_back(spill)

    def adopt(self, session: Session, pinned: Pinned) -> list[Int64s | None] | None:
        """Take over what was pinned: each chunk's pages, with a reference to each; None for one that is not
        there. None for all where their owner is gone."""
        with self._lock:
            if not self._may_take(session, pinned.pages):
                return None
            pages = pinned.pages + self._first
            ends = [0, *accumulate(pinned.lengths)]
            chunks = [pages[a:b] if a < b else None for a, b in pairwise(ends)]
            found = [own for own in chunks if own is not None]
            # A chunk may be pinned twice, which its first page shows.
            firsts = pages[[a for a, b in pairwise(ends) if a < b]].tolist()
            for together in [pages] if len(set(firsts)) == len(found) else found:
                self._counts.add(together)
                self._held[together] += 1
            if pinned.spills:
                self._adopt_spills(pinned)
            return chunks

    def own_numbers(self, session: Session, pages: Int64s) -> Int64s | None:
        """The owner's numbers of `pages`; None where any of them is another owner's."""
        with self._lock:
            if session is not self.session or (len(pages) and int(pages.min()) < self._first):
                return None
            return pages - self._first

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end()

    def _lock_all(self) -> None:
        while self.lock_slab():
            pass

    def _note_evicted(self, keys: list[bytes]) -> None:
        if self.on_evicted is not None:
            self.on_evicted(keys)

    def _take_over(self, session: Session, pages: Int64s) -> Int64s | None:
        with self._lock:
            if not self._may_take(session, pages):
                return None
            pages = pages + self._first
            self._counts.add(pages)
            self._held[pages] += 1
            return pages

    def _may_take(self, session: Session, numbers: Int64s) -> bool:
        """Whether pages that an owner gave can be had; it may be gone by now, or the pool closed."""
        if session is self.session and self._closed and not self._has_ended:
            session.free(*np.unique(numbers, return_counts=True))
        return session is self.session and not self._closed

    def _adopt_spills(self, pinned: Pinned) -> None:
        """Have what is beside pages: it has no hold of its own, and stays as long as they do."""
        for page, spill in pinned.spills.items():
            at = np.array([page + self._first])
            if not self._spills.of(at):
                self._counts.add(spill + self._first)
                self._spills.add(at, spill[None] + self._first)

    def _give_back(self, pages: Int64s) -> None:
        """End the holds of pages without a reference."""
        held = pages[self._held[pages] > 0]
        counts = self._held[held].astype(np.int64)
        self._held[held] = 0
        is_own = held >= self._first
        if self.session is not None and is_own.any():
            self.session.free(held[is_own] - self._first, counts[is_own])

    def _drop_left(self) -> None:
        """Unmap what is left of owners that are gone, once nobody uses it."""
        for left in [left for left in self._left if not self._counts.are_used(*left)]:
            self._left.remove(left)
            self._drop(left.first // self.slabs.span, left.end // self.slabs.span)
            # Seconds for hundreds of GiB: nobody who wants pages waits for that.
            self._locking.submit(self._unlock_dropped)

    def _drop(self, first: int, end: int) -> None:
        memory = list(self.slabs.memory)
        self._dropped += [slab for slab in memory[first:end] if slab.nbytes]
        memory[first:end] = [torch.empty(0, dtype=torch.uint8) for _ in memory[first:end]]
        self.slabs = self.slabs._replace(memory=memory)

    def _unlock_dropped(self) -> None:
        """Undo the page-locking of memory that nobody uses; several threads may, each of other slabs."""
        with suppress(IndexError):
            while True:
                self._unlock(self._dropped.pop())

    def _unlock(self, slab: torch.Tensor) -> None:
        try:
            self._platform.host_unregister(slab)
        except RuntimeError as error:
            self._stuck.append(slab)  # what is mapped there next could not be page-locked
            log.warning("%d bytes of host memory stay page-locked: %s", slab.nbytes, error)

    def _end(self) -> None:
        if self._closed and not self._counts.total and not self._has_ended:
            self._has_ended = True
            self._drop(0, len(self.slabs.memory))
            self._unlock_dropped()
            self.slabs = self.slabs._replace(memory=[])
            self._locking.leave()
            if self.session is not None:
                self.session.bye()
            if self.on_end is not None:
                self.on_end()

    def _growth_left(self) -> int:
        return super()._growth_left() if self.session is not None else 0

    def _has_free(self, count: int) -> bool:
        return False  # what is free, the owner knows alone

    def _grow(self) -> None:
        session, start = self.session, self.num_pages
        if session is None:
            raise MemoryError("the owner of host memory is gone")
        end = min(start + self.slabs.span, self.max_pages)
        # A storage of its own: a tier that registers memory is to take what is page-locked, not all of it.
        first = start // self.slabs.span * session.welcome.slab_bytes
        whole = session.memory.numpy()[first : first + (end - start) * self.page_stride]
        slab = torch.from_numpy(whole)
        # Mapped before: page-locking would do it with one thread, and hold the driver up meanwhile.
        give_by_threads(slab, MAPPING_THREADS)
        if not self._platform.host_register(slab):
            raise no_memory(slab.nbytes)
        with self._lock:
            if session is not self.session or self._closed:
                self._platform.host_unregister(slab)
                return
            memory, bases = [*self.slabs.memory, slab], np.append(self.slabs.bases, slab.data_ptr())
            self.slabs = self.slabs._replace(memory=memory, bases=bases)
            # Whole slabs: pages of the next owner begin at a slab of their own.
            self._counts.grow(self.slabs.span)
            self._held = np.append(self._held, np.zeros(self.slabs.span, np.int32))
            self.num_pages = end
        session.usable(end)
