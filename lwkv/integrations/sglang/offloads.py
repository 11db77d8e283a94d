"""Pages that SGLang hands over to store, all of a tick in one transfer a layer."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial

from lwkv.engine import CacheEngine
from lwkv.integrations.sglang.order import Order
from lwkv.pipeline.device_failures import DeviceFailuresTo
from lwkv.request import KeyedChunks

log = logging.getLogger(__name__)


class Offloads:
    """Stores that are queued, under way, and over, in the order in which they came.

    For the scheduler's thread; a batch ends on the engine's completion thread. Another thread of Python would
    take its time from the model's launches, see PinnedLoad.

    Args:
        order: for stores alone.

    Attributes:
        queued: what the next batch has to store.
        results: of stores that are over and not taken, oldest first: whether all was stored.
    """

    def __init__(self, engine: CacheEngine, order: Order) -> None:
        self._engine = engine
        self._parts = engine.parts()
        self._order = order
        self.queued: list[KeyedChunks] = []
        self.results: deque[bool] = deque()

    def queue(self, request: KeyedChunks) -> None:
        """Take pages for the next batch; they must not change before their completion has been taken."""
        # Now, and not when the batch starts: the next forward pass is not to be waited for.
        self._order.catch_up()
        self.queued.append(request)

    def num_completed(self) -> int:
        """Start what is queued, and count what is over and not taken."""
        if self.queued:
            self._start()
        return len(self.results)

    def pop(self) -> bool:
        """Take the oldest one that is over: whether all of its pages are in host memory."""
        return self.results.popleft()

    def clear(self, timeout_s: float) -> bool:
        """Forget all of them once nothing reads the pages; False if that takes over `timeout_s` seconds."""
        self.queued = []
        idle = self._parts.completions.wait_idle(timeout_s)
        # Another one: what is late ends in the former, whenever that is.
        self.results = deque()
        return idle

    def _start(self) -> None:
        requests, self.queued = self.queued, []
        end, storing = partial(self._end, self.results, requests), None
        with DeviceFailuresTo(_note_failure), self._order.use():
            storing = self._engine.storing(requests)
            storing.commit(end)
        if storing is None:  # else it sees to the end itself
            self._parts.completions.submit(end)

    def _end(self, results: deque[bool], requests: Sequence[KeyedChunks]) -> None:
        host, saves = self._parts.storage.host, self._engine.saves
        # Where another rank stores the rows for all, that one says whether they are there.
        results.extend([not saves or all(host.contains(request.keys)) for request in requests])


def _note_failure(error: BaseException) -> None:
    log.error("pages are not stored: %s", repr(error))
