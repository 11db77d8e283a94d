"""Pages that SGLang hands over to store, all of a tick in one transfer a layer."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import torch

from lwkv.background.workers import Workers
from lwkv.engine import CacheEngine
from lwkv.integrations.sglang.order import Order
from lwkv.request import KeyedChunks

log = logging.getLogger(__name__)


class Offloads:
    """Stores that are queued, under way, and over, in the order in which they came.

    For the scheduler's thread. A batch is begun on a thread of its own, as to make room for it and to queue
    its layers takes a while, and ends on the engine's completion thread.

    Args:
        order: for stores alone.
    """

    def __init__(self, engine: CacheEngine, order: Order) -> None:
        self._engine = engine
        self._parts = engine.parts()
        self._order = order
        self._queued: list[KeyedChunks] = []
        self._results: deque[bool] = deque()
        connector = engine.connector
        self._storing = Workers("stores", 1, partial(connector.platform.set_device, connector.device))

    def queue(self, request: KeyedChunks) -> None:
        """Take pages for the next batch; they must not change before their completion has been taken."""
        # Now, and not when the batch starts: the next forward pass is not to be waited for.
        self._order.catch_up()
        self._queued.append(request)

    def num_completed(self) -> int:
        """Start what is queued, and count what is over and not taken."""
        if self._queued:
            self._start()
        return len(self._results)

    def pop(self) -> bool:
        """Take the oldest one that is over: whether all of its pages are in host memory."""
        return self._results.popleft()

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until all that was started is over; False if that takes over `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        begun = self._storing.wait_idle(timeout_s)
        return self._parts.completions.wait_idle(deadline - time.monotonic()) and begun

    def clear(self, timeout_s: float) -> bool:
        """Forget all of them once nothing reads the pages; False if that takes over `timeout_s` seconds."""
        self._queued = []
        self._storing.cancel_queued()
        idle = self.wait_idle(timeout_s)
        # Another one: what is late ends in the former, whenever that is.
        self._results = deque()
        return idle

    def close(self, timeout_s: float) -> bool:
        """End the thread, after `clear`; False if that takes over `timeout_s` seconds."""
        return self._storing.close(timeout_s)

    def _start(self) -> None:
        requests, self._queued = self._queued, []
        # Kernels in torch may need the mode of the model, which is a thread's.
        begin = partial(self._begin, self._results, requests, torch.is_inference_mode_enabled())
        begun = self._storing.submit(begin)
        if begun.cancelled():  # there is no thread
            begin()
        begun.add_done_callback(_note_error)

    def _begin(self, results: deque[bool], requests: Sequence[KeyedChunks], inference_mode: bool) -> None:
        try:
            with torch.inference_mode(inference_mode), self._order.use():
                for _ in self._engine.store_batch(requests):
                    pass
        finally:
            # Jobs run one after the other: this one when the bytes have arrived, or never will.
            self._parts.completions.submit(partial(self._end, results, requests))

    def _end(self, results: deque[bool], requests: Sequence[KeyedChunks]) -> None:
        host = self._parts.storage.host
        results.extend([all(host.contains(request.keys)) for request in requests])


def _note_error(begun: Future[None]) -> None:
    if not begun.cancelled() and (error := begun.exception()) is not None:
        log.error("pages are not stored: %s", repr(error))
