"""A lower tier as the storage manager sees it: it never raises, and never blocks for longer than agreed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from lwkv.background.exit import waitable
from lwkv.keys import ChunkKey, LayerKey
from lwkv.platforms.protocol import Int64s
from lwkv.pool.host_pool import HostPool
from lwkv.storage.circuit_breaker import CircuitBreaker
from lwkv.storage.host_tier import Chunk
from lwkv.storage.page_quarantine import PageQuarantine
from lwkv.storage.prompt_part import PromptPart
from lwkv.storage.tier import Lingering, Missing, Ordered, Status, Tier
from lwkv.storage.tier_answers import FILLED, ask_whether_there, check_length, note_on, outcome_of
from lwkv.storage.tier_gauges import TierGauges
from lwkv.storage.use_notes import UseNotes
from lwkv.telemetry.busy_time import BusyTime
from lwkv.telemetry.counters import Counters
from lwkv.telemetry.log_throttle import LogThrottle
from lwkv.telemetry.tier_meter import Meter

log = logging.getLogger(__name__)

NUM_LOOKERS = 2
NUM_READERS = 4
NUM_WRITERS = 4
CLOSING_S = 0.5
Transfer = Callable[[Sequence[LayerKey], Sequence[torch.Tensor], float], Sequence[Status]]
Check = Callable[[int, Int64s], npt.NDArray[np.bool_]]


def all_whole(layer: int, pages: Int64s) -> npt.NDArray[np.bool_]:
    """The check that finds nothing wrong."""
    return np.ones(len(pages), bool)


class Guard:
    """Calls a tier on threads of its own, checks its answers and counts failures. Thread-safe.

    Look-ups do not queue behind reads, reads not behind writes, nor one tier's calls behind another's. A tier
    that fails is a miss.

    Args:
        check: given a layer and pages that were filled with it, int64 (pages,), which of them can be used.
    """

    def __init__(
        self,
        tier: Tier,
        pool: HostPool,
        timeout_s: float,
        counters: Counters,
        clock: Callable[[], float],
        check: Check = all_whole,
    ) -> None:
        self._tier = tier
        self._check = check
        self._pool = pool
        self._timeout_s = timeout_s
        self._counters = counters
        self._throttle = LogThrottle(log, clock)
        self._puts: dict[ChunkKey, Future[bool]] = {}
        self._lock = threading.RLock()  # a put that is refused can end others on the same thread
        self._ordered = tier if isinstance(tier, Ordered) else None
        self.name = tier.name
        self.meter = Meter()
        self.read_time, self._write_time = BusyTime(), BusyTime()
        self._quarantine = PageQuarantine(pool, tier.grace_s if isinstance(tier, Lingering) else 0.0, clock)
        self._looks = CircuitBreaker(
            tier.name, "look-up", NUM_LOOKERS, timeout_s, counters, clock, self._throttle
        )
        self._reads = CircuitBreaker(
            tier.name, "read", NUM_READERS, timeout_s, counters, clock, self._throttle
        )
        self._writes = CircuitBreaker(
            tier.name, "write", NUM_WRITERS, timeout_s, counters, clock, self._throttle
        )
        self._notes: UseNotes | None = None
        self._calls: list[CircuitBreaker] = [self._writes, self._reads, self._looks]
        if self._ordered is not None:
            self._notes = UseNotes(self._ordered, tier.name, timeout_s, counters, clock, self._throttle)
            self._calls.append(self._notes.calls)
        self._gauges = TierGauges(tier, timeout_s, counters, clock)
        self._end = CircuitBreaker(tier.name, "close", 1, timeout_s, counters, clock)

    def contains(self, keys: Sequence[ChunkKey], within_s: float = float("inf")) -> list[bool]:
        """Whether each chunk is there; blocks for `timeout_s` and `within_s` at most, after which none is."""
        if not keys:
            return []
        if not self._reads.is_answering():  # what cannot be read is not there
            self._counters.add(f"{self.name}_skipped")
            return [False] * len(keys)
        call = self._looks.submit(partial(self._contains, keys))
        wait([call], waitable(min(self._timeout_s, within_s)))
        if not call.done():
            self._looks.is_answering()  # logs it, once
            call.cancel()
        answered = call.done() and not call.cancelled() and call.exception() is None
        return call.result() if answered else [False] * len(keys)

    def get(self, keys: Sequence[ChunkKey], layer: int, pages: Int64s) -> Future[Int64s]:
        """Start to fill `pages` with `layer` of each chunk; the result is FILLED for each, or a Missing.

        The tier may write to the pages until the future is done, however late that is.
        """
        return self.get_layers([LayerKey(key, layer) for key in keys], pages)

    def get_layers(self, keys: Sequence[LayerKey], pages: Int64s) -> Future[Int64s]:
        """As `get`, for any layers of any chunks, in one call of the tier."""
        # Made here: torch lets other threads run, and a later layer's call would come before this one's.
        buffers = [self._pool.page(page) for page in pages.tolist()]
        return self._reads.submit(partial(self._get, keys, pages, buffers))

    def put(self, key: ChunkKey, chunk: Chunk, part: PromptPart | None = None) -> Future[bool]:
        """Start to copy a complete chunk of this part; its pages must not change until the future is done.

        The result is whether the tier took it. A chunk that is being put already is not put a second time.
        """
        with self._lock:
            put = self._puts.get(key)
            if put is not None:
                return put
            put = self._puts[key] = self._writes.submit(partial(self._put, key, chunk, part))
        put.add_done_callback(partial(self._end_put, key))
        return put

    @property
    def is_writing(self) -> bool:
        """Whether chunks are being put, or wait for that."""
        return bool(self._puts)

    def follow(self, prompt: Sequence[ChunkKey]) -> None:
        """Let a tier that is Ordered know that a prompt is used; never blocks."""
        if self._notes is not None and prompt:
            self._notes.add(prompt)

    def gauges(self) -> dict[str, int]:
        """What there is now, as far as is known; never waits for the tier."""
        resting = any(calls.is_resting for calls in self._calls)
        return self._gauges.known() | {"resting": int(resting)}

    @property
    def unread_until(self) -> float:
        """Until when loads skip the tier, as CircuitBreaker.rests_until."""
        return max(self._reads.rests_until, self._looks.rests_until)

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until nothing is read or written and `gauges` is up to date; False if the former took longer
        than `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        idle = self._wait_calls(deadline)
        if idle:
            self._gauges.wait_new(deadline - time.monotonic())
        return idle

    def close(self, timeout_s: float) -> bool:
        """Let what is under way end, then close the tier, once; both together within `timeout_s` seconds.

        A tier has half a second to close even where nothing is left of that. False if it did not end in time.
        """
        deadline = time.monotonic() + timeout_s
        ended = [calls.close(deadline - time.monotonic()) for calls in self._calls]
        ended.append(self._gauges.close(deadline - time.monotonic()))
        self._end.submit(self._end_tier)
        closed = self._end.close(max(CLOSING_S, deadline - time.monotonic())) and all(ended)
        if not closed:
            log.warning("tier %s did not end within the time given to close", self._tier.name)
        return closed

    def _end_tier(self) -> None:
        # Never beside another call, however long that takes: clients may break then, and the process with it.
        self._wait_calls(float("inf"))
        self._gauges.wait_idle(float("inf"))
        self._tier.close()
        self._quarantine.end()

    def _wait_calls(self, deadline: float) -> bool:
        return all(calls.wait_idle(deadline - time.monotonic()) for calls in self._calls)

    def _contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self._quarantine.let_go()
        return ask_whether_there(self._tier, keys, self._timeout_s)

    def _get(self, keys: Sequence[LayerKey], pages: Int64s, buffers: Sequence[torch.Tensor]) -> Int64s:
        self._quarantine.let_go()
        outcomes = np.full(len(pages), Missing.ERROR)
        try:
            outcomes = self._call("get", self._tier.get, keys, buffers)
        finally:
            self._quarantine.keep(pages[outcomes != FILLED])
        layers = np.array([key.layer for key in keys])
        for layer in dict.fromkeys(layers.tolist()):
            self._refuse_broken(
                layer, np.flatnonzero((layers == layer) & (outcomes == FILLED)), pages, outcomes
            )
        return outcomes

    def _refuse_broken(self, layer: int, filled: Int64s, pages: Int64s, outcomes: Int64s) -> None:
        """Make a MISS of every page of a layer that is filled with what is no page of this engine."""
        broken = filled[~self._check(layer, pages[filled])]
        if len(broken):
            outcomes[broken] = Missing.MISS
            self._counters.add(f"{self.name}_broken_pages", len(broken))
            self._throttle.warn(
                "tier %s: %d pages are not as they were stored: missing", self.name, len(broken)
            )

    def _end_put(self, key: ChunkKey, put: Future[bool]) -> None:
        with self._lock:
            del self._puts[key]

    def _put(self, key: ChunkKey, chunk: Chunk, part: PromptPart | None) -> bool:
        if self._ordered is not None and part is not None:
            part.let_know(self, partial(self._ordered.follow, deadline_s=self._timeout_s))
        if self._pool.spill_of(chunk.pages):
            # It is more than a tier has room for; the host's memory keeps it.
            self._counters.add(f"{self.name}_left_out")
            return True
        # Layer 0 is the commit record: last, and only where all other layers are there.
        others, first = range(1, len(chunk.pages)), range(1)
        return self._put_layers(key, chunk, others) and self._put_layers(key, chunk, first)

    def _put_layers(self, key: ChunkKey, chunk: Chunk, layers: Sequence[int]) -> bool:
        if not layers:
            return True
        layer_keys = [LayerKey(key, layer) for layer in layers]
        buffers = [self._pool.page(int(chunk.pages[layer])) for layer in layers]
        return bool((self._call("put", self._tier.put, layer_keys, buffers) == FILLED).all())

    def _call(
        self, kind: str, call: Transfer, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor]
    ) -> Int64s:
        start, num_bytes = time.monotonic(), 0
        busy = self.read_time if kind == "get" else self._write_time
        busy.begin()
        try:
            outcomes = self._outcomes(kind, call(keys, pages, self._timeout_s), len(keys))
            num_bytes = int((outcomes == FILLED).sum()) * self._pool.page_bytes
        finally:
            busy.end(num_bytes)
        self.meter.note_call(kind, time.monotonic() - start, num_bytes)
        return outcomes

    def _outcomes(self, call: str, statuses: Sequence[Status], expected: int) -> Int64s:
        check_length(call, statuses, expected)
        outcomes = np.array([outcome_of(status) for status in statuses], np.int64)
        missed, wrong = (int((outcomes == reason).sum()) for reason in (Missing.MISS, Missing.ERROR))
        for ending, count in ((Status.MISS, missed), (Status.ERROR, wrong)):
            if count:
                self._counters.add(f"{self._tier.name}_{call}_{ending.value}", count)
        if missed or wrong:
            self._throttle.warn(
                "tier %s: %s of %d pages: %d %s, %d failed%s",
                self._tier.name,
                call,
                expected,
                missed,
                "without room" if call == "put" else "missing",
                wrong,
                note_on(statuses),
            )
        return outcomes
