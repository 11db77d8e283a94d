"""The tiers below host memory: which of them has a chunk, and when each of them gets one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

from lwkv.keys import ChunkKey
from lwkv.pool import HostPool
from lwkv.storage.guard import Guard
from lwkv.storage.host import Chunk

Debt = tuple[Sequence[Guard], ChunkKey, Chunk]


class LowerTiers:
    """Lower tiers, nearest first. Thread-safe.

    Chunks are copied as soon as they are complete. With `write_back` they are copied when the chunks not
    copied yet have more than half of the pool, those stored longest ago first, or with `settle`. Until a
    chunk has been copied its pages have one reference more, so that it is not evicted.
    """

    def __init__(self, guards: Sequence[Guard], pool: HostPool, write_back: bool) -> None:
        self.guards = guards
        self._pool = pool
        self._write_back = write_back
        self._debts: deque[Debt] = deque()
        self._pages_owed = 0
        self._lock = threading.Lock()

    def find(self, keys: Sequence[ChunkKey], known: Sequence[bool]) -> list[Guard | None]:
        """For each key that is not `known`, the nearest tier that has it."""
        found: list[Guard | None] = [None] * len(keys)
        for guard in self.guards:
            rest = [i for i, there in enumerate(known) if not there and found[i] is None]
            for i, there in zip(rest, guard.contains([keys[i] for i in rest]), strict=True):
                found[i] = guard if there else None
        return found

    def nearer_than(self, guard: Guard | None) -> Sequence[Guard]:
        """The tiers that are asked before `guard`."""
        return self.guards[: self.guards.index(guard)] if guard is not None else ()

    def keep(self, guards: Sequence[Guard], key: ChunkKey, chunk: Chunk) -> None:
        """Have these tiers get a complete chunk, now or later; takes references to its pages of its own."""
        if not guards:
            return
        if not self._write_back:
            self._write(guards, key, chunk)
            return
        self._pool.share(chunk.pages)
        with self._lock:
            self._debts.append((guards, key, chunk))
            self._pages_owed += len(chunk.pages)
        self._settle(self._pool.max_pages // 2)

    def settle(self) -> None:
        """Start to copy all that is not copied yet."""
        self._settle(0)

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until nothing is read or written; False if that took longer than `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        return all(guard.wait_idle(deadline - time.monotonic()) for guard in self.guards)

    def close(self, timeout_s: float) -> bool:
        """Copy what is not copied yet, then close all; False if that took longer than `timeout_s` seconds."""
        self._write_back = False  # what comes from now on is refused by the tiers, and kept by nobody
        self.settle()
        deadline = time.monotonic() + timeout_s
        ended = [guard.close(deadline - time.monotonic()) for guard in self.guards]
        return all(ended)

    def _settle(self, most_pages: int) -> None:
        while (debt := self._next_debt(most_pages)) is not None:
            guards, key, chunk = debt
            with ExitStack() as ending:
                ending.callback(self._pool.release, chunk.pages)
                self._write(guards, key, chunk)

    def _next_debt(self, most_pages: int) -> Debt | None:
        with self._lock:
            if self._pages_owed <= most_pages:
                return None
            debt = self._debts.popleft()
            self._pages_owed -= len(debt[2].pages)
            return debt

    def _write(self, guards: Sequence[Guard], key: ChunkKey, chunk: Chunk) -> None:
        for guard in guards:
            self._pool.share(chunk.pages)
            with ExitStack() as undo:
                undo.callback(self._pool.release, chunk.pages)
                put = guard.put(key, chunk)
                undo.pop_all()
            put.add_done_callback(lambda _: self._pool.release(chunk.pages))
