"""The tiers below host memory: which of them has a chunk, and when each of them gets one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from lwkv.keys import ChunkKey
from lwkv.pool.host_pool import HostPool
from lwkv.storage.guard import Guard
from lwkv.storage.host_tier import Chunk
from lwkv.storage.prompt_part import PromptPart, PromptRows, one_row
from lwkv.storage.read_back import ReadBack


class PendingCopy(NamedTuple):
    """A complete chunk of `part` that these tiers are to get; owns a reference to its pages."""

    guards: Sequence[Guard]
    key: ChunkKey
    chunk: Chunk
    part: PromptPart


class LowerTiers:
    """Lower tiers, nearest first. Thread-safe.

    Chunks are copied as soon as they are complete. With `write_back` they are copied when the chunks not
    copied yet have more than half of the pool, those stored longest ago first, or with `settle`. Until a
    chunk has been copied its pages have one reference more, so that it is not evicted. What a tier that is
    skipped does not take stays to be copied, up to that half; the rest is given up.

    Args:
        rows: in which tiers keep chunks that are used together.
    """

    def __init__(
        self, guards: Sequence[Guard], pool: HostPool, write_back: bool, rows: PromptRows = one_row
    ) -> None:
        self.guards = guards
        self._rows = rows
        self._pool = pool
        self._write_back = write_back
        self._pending: deque[PendingCopy] = deque()
        self._pending_pages = 0
        self._given_up = 0
        self._read_backs: dict[Guard, ReadBack] = {}
        self._lock = threading.Lock()

    def read_back_first(self) -> None:
        """Have some of the first chunks that each tier gets read back, see ReadBack."""
        self._read_backs = {guard: ReadBack(guard, self._pool) for guard in self.guards}

    def find(
        self, keys: Sequence[ChunkKey], known: Sequence[bool], within_s: float = float("inf")
    ) -> list[Guard | None]:
        """For each key that is not `known`, the nearest tier that has it, as far as they say so
        within `within_s`."""
        found: list[Guard | None] = [None] * len(keys)
        until = time.monotonic() + within_s
        for guard in self.guards:
            rest = [i for i, there in enumerate(known) if not there and found[i] is None]
            left = max(0.0, until - time.monotonic())
            for i, there in zip(rest, guard.contains([keys[i] for i in rest], left), strict=True):
                found[i] = guard if there else None
        return found

    def nearer_than(self, guard: Guard | None) -> Sequence[Guard]:
        """The tiers that are asked before `guard`."""
        return self.guards[: self.guards.index(guard)] if guard is not None else ()

    def follow(self, prompt: Sequence[ChunkKey]) -> None:
        """Let the tiers know that a prompt is used that begins with these chunks; never blocks."""
        for guard in self.guards:
            for row in self._rows(prompt):
                guard.follow(row)

    def part_of(self, prompt: Sequence[ChunkKey]) -> PromptPart:
        """These chunks as what `keep` is given of them."""
        return PromptPart(prompt, self.guards, self._rows)

    def keep(self, guards: Sequence[Guard], key: ChunkKey, chunk: Chunk, part: PromptPart) -> None:
        """Have these tiers get a complete chunk, now or later; takes references to its pages of its own."""
        if not guards:
            return
        self._pool.share(chunk.pages)
        copy = PendingCopy(guards, key, chunk, part)
        if self._defer(copy):
            self._settle(self._pool.max_pages // 2)
        else:
            self._write_now(copy)

    def settle(self) -> None:
        """Start to copy all that is not copied yet."""
        self._settle(0)

    def flush(self, timeout_s: float) -> bool:
        """Copy all that is not copied yet; False if that took longer than `timeout_s` seconds, or a tier did
        not take all that it was to get since the last call."""
        self.settle()
        idle = self.wait_idle(timeout_s)
        with self._lock:
            given_up, self._given_up = self._given_up, 0
            return idle and not given_up and not self._pending

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until nothing is read or written; False if that took longer than `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        return all(guard.wait_idle(deadline - time.monotonic()) for guard in self.guards)

    def close(self, timeout_s: float) -> bool:
        """Copy what is not copied yet, then close all; False if that took longer than `timeout_s` seconds."""
        with self._lock:
            self._write_back = False  # what comes from now on is refused by the tiers, and kept by nobody
        self.settle()
        deadline = time.monotonic() + timeout_s
        ended = [guard.close(deadline - time.monotonic()) for guard in self.guards]
        return all(ended)

    def _settle(self, most_pages: int) -> None:
        for _ in range(len(self._pending)):  # no more often: what a tier does not take comes back
            if (copy := self._next_deferred(most_pages)) is not None:
                self._write_now(copy)

    def _defer(self, copy: PendingCopy, most_pages: float = float("inf")) -> bool:
        """Note that a chunk is to be copied later, if there are no more than `most_pages` then; takes over a
        reference to its pages."""
        num_pages = len(copy.chunk.pages)
        with self._lock:
            if not self._write_back or self._pending_pages + num_pages > most_pages:
                return False
            self._pending.append(copy)
            self._pending_pages += num_pages
            return True

    def _write_now(self, copy: PendingCopy) -> None:
        with ExitStack() as ending:
            ending.callback(self._pool.release, copy.chunk.pages)
            self._write(copy)

    def _next_deferred(self, most_pages: int) -> PendingCopy | None:
        with self._lock:
            if self._pending_pages <= most_pages:
                return None
            copy = self._pending.popleft()
            self._pending_pages -= len(copy.chunk.pages)
            return copy

    def _write(self, copy: PendingCopy) -> None:
        for guard in copy.guards:
            self._pool.share(copy.chunk.pages)
            with ExitStack() as undo:
                undo.callback(self._pool.release, copy.chunk.pages)
                put = guard.put(copy.key, copy.chunk, copy.part)
                undo.pop_all()
            put.add_done_callback(partial(self._written, copy._replace(guards=(guard,))))

    def _written(self, copy: PendingCopy, put: Future[bool]) -> None:
        if put.cancelled() and self._defer(copy, self._pool.max_pages // 2):
            return
        with ExitStack() as ending:
            ending.callback(self._pool.release, copy.chunk.pages)
            if put.cancelled() or put.exception() is not None or not put.result():
                with self._lock:
                    self._given_up += 1
            elif (read_back := self._read_backs.get(copy.guards[0])) is not None:
                read_back.note_written(copy.key, copy.chunk)
