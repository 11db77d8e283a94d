"""Pages that a tier may still write to though its call has ended."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from lwkv.platforms.protocol import Int64s
from lwkv.pool.host_pool import HostPool


class PageQuarantine:
    """Keeps pages from being handed out again until `grace_s` seconds have passed. Thread-safe.

    No timer: `let_go` frees those whose time is over.
    """

    def __init__(self, pool: HostPool, grace_s: float, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._grace_s = grace_s
        self._clock = clock
        self._kept: deque[tuple[float, Int64s]] = deque()
        self._lock = threading.Lock()

    def keep(self, pages: Int64s) -> None:
        """Take a reference to each of `pages`, int64 (pages,), for the time of grace."""
        if self._grace_s and len(pages):
            self._pool.share(pages)
            with self._lock:
                self._kept.append((self._clock() + self._grace_s, pages.copy()))

    def let_go(self) -> None:
        """Give back the pages whose time is over."""
        now = self._clock()
        while (pages := self._next(now)) is not None:
            self._pool.release(pages)

    def end(self) -> None:
        """Give back all: nobody writes to them any more."""
        while (pages := self._next(float("inf"))) is not None:
            self._pool.release(pages)

    def _next(self, now: float) -> Int64s | None:
        with self._lock:
            return self._kept.popleft()[1] if self._kept and self._kept[0][0] <= now else None
