"""Chunks that are brought from lower tiers to host memory before the load that needs them begins."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from lwkv.background.workers import Workers
from lwkv.keys import ChunkKey
from lwkv.storage.hold import Hold, LayerPages
from lwkv.storage.host_tier import Chunk
from lwkv.storage.manager import StorageManager

log = logging.getLogger(__name__)

CHUNKS_AT_A_TIME = 8
"""What is read together. Chunks become visible group by group, so a slow tier has brought some in time."""

NUM_LOOKERS = 2


class Prefetches:
    """Brings the chunks of several prompts to host memory in the background, and pins them there.

    No method waits for a tier. The caller limits how many chunks are asked for at a time, since all of them
    stay pinned until `release`. For one thread.

    Args:
        num_layers: layers of every chunk.
    """

    def __init__(self, storage: StorageManager, num_layers: int) -> None:
        self._storage = storage
        self._num_layers = num_layers
        self._jobs = Workers("prefetch", NUM_LOOKERS)
        self._open: dict[int, Prefetch] = {}
        self._ended: deque[int] = deque()

    def begin(self, number: int, keys: Sequence[ChunkKey], first: int, pins: bool = True) -> None:
        """Bring what is missing of `keys` from chunk `first` on, under a number that is not in use.

        Args:
            keys: all chunks of a prompt, or the first ones.
            pins: False for chunks that may be evicted as soon as they are there.
        """
        over = partial(self._ended.append, number)
        layers = range(self._num_layers)
        prefetch = Prefetch(self._storage, layers, self._jobs, keys, first, over, pins)
        self._open[number] = prefetch
        prefetch.begin()

    def ended(self) -> list[int]:
        """The numbers of those that have ended since the last call: no more chunks of theirs will come."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def release(self, number: int) -> None:
        """Unpin what one has brought, and bring nothing more of it."""
        prefetch = self._open.pop(number, None)
        if prefetch is not None:
            prefetch.release()

    def close(self) -> None:
        """Release all."""
        for number in list(self._open):
            self.release(number)
        self._jobs.leave()


class Prefetch:
    """One prompt's chunks on their way to host memory, some at a time."""

    def __init__(
        self,
        storage: StorageManager,
        layers: range,
        jobs: Workers,
        keys: Sequence[ChunkKey],
        first: int,
        over: Callable[[], object],
        pins: bool = True,
    ) -> None:
        self._pins = pins
        self._storage = storage
        self._layers = layers
        self._jobs = jobs
        self._keys = keys
        self._next = first
        self._over = over
        self._lock = threading.Lock()
        self._missing_layers = 0
        self._hold: Hold | None = None
        self._pinned: list[Chunk] = []
        self._released = False

    def begin(self) -> None:
        """Ask for the next chunks, on another thread: a look-up may block."""
        self._jobs.submit(self._ask).add_done_callback(self._asked)

    def release(self) -> None:
        """Give everything back; what still arrives goes back at once."""
        with self._lock:
            self._released = True
            hold, self._hold = self._hold, None
            pinned, self._pinned = self._pinned, []
        if hold is not None:
            hold.release()
        self._storage.host.unpin(pinned)

    def _ask(self) -> None:
        first, end = self._next, min(self._next + CHUNKS_AT_A_TIME, len(self._keys))
        hold = self._storage.hold(self._keys[:end], first)
        is_last = end == len(self._keys) or len(hold.found) < end - first
        self._next = end
        with self._lock:
            self._hold = hold
            released = self._released
        if released:
            hold.release()
            return
        layers = self._storage.layerwise_batched_get(hold, self._layers if hold.lower else ())
        # One more than there are: the group does not end before all have been asked for.
        self._missing_layers = len(layers) + 1
        for layer in layers:
            layer.add_done_callback(partial(self._count_layer, hold, is_last))
        self._count_layer(hold, is_last)

    def _asked(self, job: Future[None]) -> None:
        if not job.cancelled() and (error := job.exception()) is not None:
            log.error("chunks are not brought to host memory ahead", exc_info=error)
        elif not job.cancelled():
            return
        self._over()

    def _count_layer(self, hold: Hold, is_last: bool, layer: Future[LayerPages] | None = None) -> None:
        with self._lock:
            self._missing_layers -= 1
            if self._missing_layers:
                return
        self._end_group(hold, is_last)

    def _end_group(self, hold: Hold, is_last: bool) -> None:
        hold.release()
        keys = [item.key for item in hold.found]
        # A chunk that has gone again by now is not promised: whoever watches host memory knows of it.
        pinned = [chunk for chunk in self._storage.host.pin(keys) if chunk is not None]
        has_all = len(pinned) == len(keys)
        if not self._pins:
            self._storage.host.unpin(pinned)
            pinned = []
        with self._lock:
            released = self._released
            self._pinned += [] if released else pinned
            self._hold = None
        if released:
            self._storage.host.unpin(pinned)
        elif is_last or not has_all:
            self._over()
        else:
            self.begin()
