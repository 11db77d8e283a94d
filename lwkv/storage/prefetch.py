"""Chunks that are brought from lower tiers to host memory before the load that needs them begins."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial

from lwkv.background.workers import Workers
from lwkv.keys import ChunkKey
from lwkv.platforms.protocol import Int64s
from lwkv.storage.hold import Hold
from lwkv.storage.host_tier import Chunk
from lwkv.storage.manager import StorageManager

log = logging.getLogger(__name__)

CHUNKS_AT_A_TIME = 2
"""What becomes visible together, so that a tier that is slow, or gets slow, has brought some in time."""

GROUPS_AT_ONCE = 4
"""How many groups of so many chunks are asked for before they are there; the first one alone, to see how it
goes: what was asked for is read, though nobody may want it any more."""

NUM_LOOKERS = 2


class Prefetches:
    """Brings the chunks of several prompts to host memory in the background, and pins them there.

    One prompt after the other: the next one's are asked for when all of the one before have been. No method
    waits for a tier. The caller limits how many chunks are asked for at a time, since all of them stay pinned
    until `release`. For one thread.

    Args:
        storage: of the chunks, where none is named in `begin`.
    """

    def __init__(self, storage: StorageManager) -> None:
        self._storage = storage
        self._jobs = Workers("prefetch", NUM_LOOKERS)
        self._open: dict[int, Prefetch] = {}
        self._ended: deque[int] = deque()
        self._turns = Turns()

    def begin(
        self,
        fetch_number: int,
        keys: Sequence[ChunkKey],
        first: int,
        pins: bool = True,
        storage: StorageManager | None = None,
    ) -> None:
        """Bring what is missing of `keys` from chunk `first` on, under a number that is not in use.

        Args:
            keys: all chunks of a prompt, or the first ones.
            pins: False for chunks that may be evicted as soon as they are there.
            storage: of these chunks.
        """
        over = partial(self._ended.append, fetch_number)
        prefetch = Prefetch(storage or self._storage, self._jobs, keys, first, over, self._turns, pins)
        self._open[fetch_number] = prefetch
        self._turns.add(prefetch)

    def ended(self) -> list[int]:
        """The numbers of those that have ended since the last call: no more chunks of theirs will come."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def stop(self, fetch_number: int) -> None:
        """Bring nothing more of one, and go on pinning what has come; it ends."""
        if fetch_number in self._open:
            self._open[fetch_number].stop()

    def release(self, fetch_number: int) -> None:
        """Unpin what one has brought, and bring nothing more of it."""
        prefetch = self._open.pop(fetch_number, None)
        if prefetch is not None:
            prefetch.release()
            self._turns.leave(prefetch)

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until none is asking for chunks; False if that takes over `timeout_s`."""
        return self._jobs.wait_idle(timeout_s)

    def close(self) -> None:
        """Release all."""
        for fetch_number in list(self._open):
            self.release(fetch_number)
        self._jobs.leave()


class Turns:
    """Whose chunks are asked for now, and who comes next. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: deque[Prefetch] = deque()
        self._first: Prefetch | None = None
        self._lock = threading.Lock()

    def add(self, prefetch: Prefetch) -> None:
        """Have one begin when all others have asked for their chunks."""
        with self._lock:
            self._waiting.append(prefetch)
        self._begin_next()

    def leave(self, prefetch: Prefetch) -> None:
        """Note that one will ask for nothing more, or never did."""
        with self._lock:
            if prefetch in self._waiting:
                self._waiting.remove(prefetch)
            if self._first is prefetch:
                self._first = None
        self._begin_next()

    def _begin_next(self) -> None:
        with self._lock:
            if self._first is not None or not self._waiting:
                return
            self._first = prefetch = self._waiting.popleft()
        prefetch.begin()


class Prefetch:
    """One prompt's chunks on their way to host memory, some at a time."""

    def __init__(
        self,
        storage: StorageManager,
        jobs: Workers,
        keys: Sequence[ChunkKey],
        first: int,
        over: Callable[[], object],
        turns: Turns,
        pins: bool = True,
    ) -> None:
        self._pins = pins
        self._storage = storage
        self._jobs = jobs
        self._keys = keys
        self._next = first
        self._over = over
        self._turns = turns
        self._lock = threading.Lock()
        self._most_groups = 1
        self._groups: set[ReadGroup] = set()
        self._pinned: list[Chunk] = []
        self._is_noted = False
        self._is_asking = self._has_asked_all = self._has_stopped = False
        self._has_ended = self._released = False

    def begin(self) -> None:
        """Ask for the next chunks, on another thread: a look-up may block."""
        with self._lock:
            if self._is_asking or not self._may_ask():
                return
            self._is_asking = True
        self._jobs.submit(self._ask).add_done_callback(self._asked)

    def stop(self) -> None:
        """Ask for nothing more; calls that were asked for and have not begun do nothing."""
        with self._lock:
            self._has_asked_all = self._has_stopped = True
            groups = list(self._groups)
        for group in groups:
            group.cancel()
        self._end_if_last()

    def release(self) -> None:
        """Give everything back; what still arrives goes back at once."""
        with self._lock:
            self._released = self._has_stopped = True
            groups, self._groups = self._groups, set()
            pinned, self._pinned = self._pinned, []
        for group in groups:
            group.hold.release()
            group.cancel()
        self._storage.host.unpin(pinned)

    def _may_ask(self) -> bool:
        return not (self._released or self._has_asked_all) and len(self._groups) < self._most_groups

    def _ask(self) -> None:
        if not self._is_noted:
            self._is_noted = True
            self._storage.note_use(self._keys)
        while self._ask_for_group():
            pass

    def _ask_for_group(self) -> bool:
        """Ask for the next chunks, if it is time for them; False once it is not."""
        with self._lock:
            if not self._may_ask():
                self._is_asking = False
                return False
        first, end = self._next, min(self._next + CHUNKS_AT_A_TIME, len(self._keys))
        group = ReadGroup(self._storage.hold(self._keys[:end], first, is_noted=True), self._end_group)
        self._next = end
        with self._lock:
            self._has_asked_all |= end == len(self._keys) or len(group.hold.found) < end - first
            released = self._released
            if not released:
                self._groups.add(group)
        if released:
            group.hold.release()
        else:
            self._begin_group(group)
        return True

    def _begin_group(self, group: ReadGroup) -> None:
        with ExitStack() as undo:
            undo.callback(self._drop_group, group)
            group.ask(self._storage)
            undo.pop_all()
        if self._has_stopped:
            group.cancel()

    def _drop_group(self, group: ReadGroup) -> None:
        with self._lock:
            self._groups.discard(group)
        group.hold.release()

    def _asked(self, job: Future[None]) -> None:
        if job.cancelled() or job.exception() is not None:
            with self._lock:
                self._has_asked_all, self._is_asking = True, False
        if not job.cancelled() and (error := job.exception()) is not None:
            log.error("chunks are not brought to host memory ahead", exc_info=error)
        self._end_if_last()

    def _end_group(self, group: ReadGroup) -> None:
        hold = group.hold
        hold.release()
        keys = [item.key for item in hold.found]
        # A chunk that has gone again by now is not promised: whoever watches host memory knows of it.
        pinned = [chunk for chunk in self._storage.host.pin(keys) if chunk is not None]
        has_all = len(pinned) == len(keys)
        with self._lock:
            self._groups.discard(group)
            self._most_groups = min(2 * self._most_groups, GROUPS_AT_ONCE)
            self._has_asked_all |= not has_all
            keeps = self._pins and not self._released
            self._pinned += pinned if keeps else []
        if not keeps:
            self._storage.host.unpin(pinned)
        self.begin()
        self._end_if_last()

    def _end_if_last(self) -> None:
        """Let the next prompt begin once all is asked for; say so once all has come."""
        with self._lock:
            asks_no_more = self._has_asked_all and not self._is_asking
            ends = asks_no_more and not (self._groups or self._released or self._has_ended)
            self._has_ended |= ends
        if asks_no_more:
            self._turns.leave(self)
        if ends:
            self._over()


class ReadGroup:
    """Chunks that are read together.

    Args:
        over: called with the group when all calls have ended, or have failed.
    """

    def __init__(self, hold: Hold, over: Callable[[ReadGroup], object]) -> None:
        self.hold = hold
        self._over = over
        self._calls: Sequence[Future[Int64s]] = ()
        self._lock = threading.Lock()
        self._num_missing = 0

    def ask(self, storage: StorageManager) -> None:
        """Ask for the chunks."""
        self._calls = storage.batched_get(self.hold, partial(self._count, -1))
        # Some may have ended by now, before it is known how many there are: it is below 0 until here.
        self._count(len(self._calls))

    def cancel(self) -> None:
        """Have calls that have not begun do nothing."""
        for call in self._calls:
            call.cancel()

    def _count(self, more: int) -> None:
        with self._lock:
            self._num_missing += more
            if self._num_missing:
                return
        self._over(self)
