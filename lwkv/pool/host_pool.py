"""Host memory: page-locked slabs, cut into equal pages that are counted by reference."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from lwkv.errors import ConfigError
from lwkv.platforms import Int64s, Platform
from lwkv.pool.page_copies import Slabs
from lwkv.pool.page_refcounts import PageRefcounts
from lwkv.pool.page_spills import PageSpills
from lwkv.telemetry.counters import Counters

log = logging.getLogger(__name__)

PAGE_ALIGNMENT = 4096
DEFAULT_SLAB_BYTES = 256 << 20
FIRST_REST_S = 1.0
MOST_REST_S = 64.0


def page_stride(page_bytes: int) -> int:
    """Bytes from the start of a page of `page_bytes` usable bytes to that of the next."""
    return -(-page_bytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


class HostPool:
    """Pages of page-locked host memory, numbered from 0; slabs are added up to `max_bytes`.

    A page starts 4096-aligned and holds `page_bytes` usable bytes. Every page handed out has a reference
    count; at zero it is free again. All methods are thread-safe.

    Where a slab cannot be page-locked the pool goes on with what it has and tries again after 1 s, then 2, up
    to 64: other programs may give memory back.

    Attributes:
        slabs: the memory of all pages there are now; a new one where slabs are added.

    Args:
        page_bytes: usable bytes of a page, > 0.
        max_bytes: upper bound of all slabs together.
        slab_bytes: size of one slab; rounded down to whole pages, at least one.
        counters: where slabs that could not be page-locked are counted, as "page_lock_failures".
        clock: seconds; when to try again.
        on_demand: whether `allocate` page-locks a slab where pages are missing. Otherwise it gives what is
            there, and slabs are added by `reserve`, `lock_slab` and `grow_ahead` alone.

    Raises:
        ConfigError: `max_bytes` does not hold a single page.
    """

    def __init__(
        self,
        platform: Platform,
        page_bytes: int,
        max_bytes: int,
        slab_bytes: int = DEFAULT_SLAB_BYTES,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_demand: bool = True,
    ) -> None:
        self._platform = platform
        self.page_bytes = page_bytes
        self.page_stride = page_stride(page_bytes)
        self.max_pages = max_bytes // self.page_stride
        if self.max_pages == 0:
            raise ConfigError(
                f"max_local_cpu_size holds {max_bytes} bytes, but one chunk of one layer needs "
                f"{self.page_stride}: raise max_local_cpu_size or lower chunk_size"
            )
        span = min(self.max_pages, max(1, slab_bytes // self.page_stride))
        self.slabs = Slabs([], np.zeros(0, np.int64), span, self.page_stride)
        self._counts = PageRefcounts(span)
        self._spills = PageSpills()
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self.num_pages = 0
        self._counters = counters or Counters()
        self._clock = clock
        self._on_demand = on_demand
        self._rest_s = FIRST_REST_S
        self._rest_until = clock()
        self._closed = False

    def require_chunk(self, num_layers: int) -> None:
        """Raise ConfigError where all pages together do not hold one chunk, a page a layer."""
        if self.max_pages < num_layers:
            needed = num_layers * self.page_stride
            raise ConfigError(
                f"max_local_cpu_size holds {self.max_pages} pages of {self.page_stride} bytes, but one chunk "
                f"of {num_layers} layers needs {num_layers}: raise max_local_cpu_size to "
                f"{needed / (1 << 30):.6f} or more, or lower chunk_size"
            )

    @property
    def pages_in_use(self) -> int:
        with self._lock:
            return self.num_pages - self._counts.num_free

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use."""
        return self.pages_in_use * self.page_stride

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all pages that there may be."""
        return self.max_pages * self.page_stride

    @property
    def available(self) -> int:
        """Pages that `allocate` can give now; 0 after `close`."""
        with self._lock:
            more = self._growth_left() if self._on_demand else 0
            return 0 if self._closed else self._counts.num_free + more

    @property
    def references(self) -> int:
        """Sum of all reference counts."""
        with self._lock:
            return self._counts.total

    def totals(self) -> dict[str, int]:
        """How many pages there are and are in use, and the sum of all reference counts."""
        in_use, references = self.pages_in_use, self.references
        return {"pages": self.num_pages, "pages_in_use": in_use, "page_references": references}

    def reserve(self, num_bytes: int) -> None:
        """Page-lock slabs for `num_bytes` now instead of on demand. Raises MemoryError."""
        with self._growing:
            while self.num_pages < min(self.max_pages, -(-num_bytes // self.page_stride)):
                self._grow()

    def allocate(self, count: int) -> Int64s | None:
        """Take `count` pages with one reference each, as int64 (count,), or nothing at all.

        Neighbouring numbers are neighbouring memory wherever the pool has such runs. Returns None where the
        pages are not there, or after `close`; never waits.
        """
        while True:
            with self._lock:
                if self._closed or count > self.max_pages:
                    return None
                if count <= self._counts.num_free:
                    return self._counts.take(count)
                if not (self._on_demand and self._growth_left()):
                    return None
            self._grow_for(count)

    def shortage(self, count: int) -> int:
        """How many pages more would have to be free for `allocate(count)`; more than exist after `close`."""
        with self._lock:
            return self.max_pages + 1 if self._closed else max(0, count - self._counts.num_free)

    def lock_slab(self) -> bool:
        """Page-lock one more slab; False where there is no more to be had. Blocks meanwhile."""
        return self._grow_for(self.max_pages)

    def grow_ahead(self, count: int) -> None:
        """Page-lock slabs now, where there may be more, so that `count` pages are free. Blocks meanwhile."""
        while self._grow_for(min(count, self.max_pages)):
            pass

    def shared(self, pages: Int64s) -> npt.NDArray[np.bool_]:
        """Which of `pages`, of any shape, have several references: one `release` does not free them."""
        with self._lock:
            return self._counts.shared(pages)

    def share(self, pages: Int64s) -> None:
        """Add one reference to each of `pages`. Raises ValueError as `release`."""
        with self._lock:
            self._counts.share(pages)

    def release(self, pages: Int64s) -> None:
        """Drop one reference of each of `pages`, in any order; free those at zero.

        Raises ValueError, having changed nothing, for a page that is not in use or is named twice.
        """
        with self._lock:
            self._counts.release(pages)
            if self._spills:
                self._counts.release(self._spills.take(self._counts.unused(pages)))
            self._end()

    def add_spill(self, pages: Int64s, spill: Int64s) -> None:
        """Let `spill`, int64 (pages, n), be beside `pages`, int64 (pages,): freed together with them."""
        with self._lock:
            self._spills.add(pages, spill)

    def spill_of(self, pages: Int64s) -> dict[int, Int64s]:
        """The pages beside those of `pages`, int64 (pages,), that have some, by their position there."""
        with self._lock:
            return self._spills.of(pages)

    def drop_spill(self, pages: Int64s) -> None:
        """Free what is beside `pages`, of any shape."""
        with self._lock:
            self._counts.release(self._spills.take(pages))

    def page(self, number: int) -> torch.Tensor:
        """The usable bytes of a page, uint8 (page_bytes,); valid as long as the caller holds a reference."""
        slab, place = divmod(number, self.slabs.span)
        return self.slabs.memory[slab].narrow(0, place * self.page_stride, self.page_bytes)

    def heads(self, pages: Int64s, num_bytes: int) -> npt.NDArray[np.uint8]:
        """A copy of the first `num_bytes` bytes of each page, uint8 (pages, num_bytes); valid as `page`."""
        slab_of, places = np.divmod(pages, self.slabs.span)
        heads = np.empty((len(pages), num_bytes), np.uint8)
        for slab in set(slab_of.tolist()):
            inside = slab_of == slab
            rows = self.slabs.memory[slab].numpy().reshape(-1, self.page_stride)
            heads[inside] = rows[places[inside], :num_bytes]
        return heads

    def close(self) -> None:
        """Hand out nothing any more; the slabs go back to the system with the last page in use."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        if self._closed and self._counts.num_free == self.num_pages:
            self.slabs = self.slabs._replace(memory=[])

    def _growth_left(self) -> int:
        """Pages that may still be added, as far as is known now."""
        return 0 if self._clock() < self._rest_until else self.max_pages - self.num_pages

    def _grow_for(self, count: int) -> bool:
        """Add a slab if `count` pages are not free; False if they are, or there is no more to be had."""
        with self._growing:
            if self._closed or self._has_free(count) or not self._growth_left():
                return False
            try:
                self._grow()
            except MemoryError as error:
                self._rest(error)
                return False
            self._rest_s = FIRST_REST_S
            return True

    def _has_free(self, count: int) -> bool:
        """Whether others have grown the pool meanwhile."""
        return self._counts.num_free >= count

    def _rest(self, error: MemoryError) -> None:
        self._counters.add("page_lock_failures")
        if self._rest_s == FIRST_REST_S:
            log.warning(
                "host memory stays at %d of %d pages for now: %s; free host memory, raise the limit of "
                "locked memory (ulimit -l) or lower max_local_cpu_size",
                self.num_pages,
                self.max_pages,
                error,
            )
        self._rest_until = self._clock() + self._rest_s
        self._rest_s = min(2 * self._rest_s, MOST_REST_S)

    def _grow(self) -> None:
        # Page-locking takes long; the lock is not held, so that pages go on being handed out.
        start = self.num_pages
        end = min(start + self.slabs.span, self.max_pages)
        slab = self._platform.alloc_pinned((end - start) * self.page_stride)
        with self._lock:
            # A new list: batches made before keep the one they were given.
            memory, bases = [*self.slabs.memory, slab], np.append(self.slabs.bases, slab.data_ptr())
            self.slabs = self.slabs._replace(memory=memory, bases=bases)
            self._counts.grow(end - start)
            self.num_pages = end
            self._end()  # the pool may have been closed meanwhile
