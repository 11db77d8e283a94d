"""Requests that wait until lower tiers have brought their chunks to host memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lwkv.integrations.vllm.orders import Fetch, packed
from lwkv.integrations.vllm.reports import RankReport
from lwkv.integrations.vllm.scheduler.lookup.index import RankKeys
from lwkv.telemetry.counters import Counters
from lwkv.telemetry.log_throttle import LogThrottle

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class WaitingLoad:
    """What one request waits for.

    Attributes:
        number: names it in orders and reports; no number is used twice.
        num_chunks: that are pinned in the host memory of each rank for it.
        since: when it began to wait.
        is_ordered: whether the workers have heard of it.
        is_over: whether the request does not wait any more.
        is_held: whether the workers keep its chunks.
        measures: whether no request waits for it: it shows how fast a tier is.
    """

    number: int
    fetch: Fetch
    num_chunks: int
    since: float
    is_ordered: bool = False
    is_over: bool = False
    is_held: bool = False
    measures: bool = False
    ended: set[int] = field(default_factory=set)


class WaitingLoads:
    """Has the workers fetch chunks for waiting requests, and says for how long each of these waits.

    Chunks are fetched in the order in which requests came, up to a limit for all of them together. A request
    waits for `timeout_s` at most; what has been fetched stays pinned as long again, and then may be evicted.

    Args:
        clock: seconds.
    """

    def __init__(
        self,
        num_ranks: int,
        timeout_s: float,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._counters = counters
        self._clock = clock
        self._loads: dict[str, WaitingLoad] = {}
        self._to_begin: list[Fetch] = []
        self._to_release: list[int] = []
        self._last_number = 0
        self._throttle = LogThrottle(log, clock)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    def begin(self, request_id: str, keys: RankKeys, first: int, end: int, most_chunks: int) -> None:
        """Have chunks [first, end) of a prompt fetched, no more than `most_chunks` of them.

        Args:
            keys: of each rank, all chunks from the prompt's first on.
        """
        self._last_number += 1
        end = min(end, first + most_chunks)
        fetch = Fetch(self._last_number, first, [packed(own[:end]) for own in keys])
        self._loads[request_id] = WaitingLoad(fetch.number, fetch, end - first, self._clock())
        self._counters.add("requests_waited")

    def measure(self, keys: RankKeys, chunk: int, most_chunks: int) -> None:
        """Have one chunk fetched for which no request waits, if there is room and no other one on its way."""
        if self._num_held() >= most_chunks or any(load.measures for load in self._loads.values()):
            return
        self._last_number += 1
        fetch = Fetch(self._last_number, chunk, [packed(own[: chunk + 1]) for own in keys], pins=False)
        load = WaitingLoad(fetch.number, fetch, 1, self._clock())
        load.is_ordered = load.is_held = load.is_over = load.measures = True
        self._loads[f"measurement {fetch.number}"] = load
        self._to_begin.append(fetch)

    @property
    def num_coming(self) -> int:
        """Chunks that are on their way from lower tiers for requests that wait."""
        return sum(load.num_chunks for load in self._loads.values() if load.is_held and not load.is_over)

    def waits(self, request_id: str, most_chunks: int) -> bool:
        """Whether a request has to wait on. At most `most_chunks` are fetched and kept, for all requests."""
        load = self._loads.get(request_id)
        if load is None or load.is_over:
            return False
        if self._clock() - load.since >= self._timeout_s:
            self._give_up(load)
        elif not load.is_ordered and load.num_chunks <= most_chunks - self._num_held():
            load.is_ordered = load.is_held = True
            self._to_begin.append(load.fetch)
        return not load.is_over

    def learn(self, report: RankReport) -> None:
        """Take over which fetches have ended on a rank."""
        for name, load in list(self._loads.items()):
            if load.number not in report.fetched:
                continue
            load.ended.add(report.info.rank)
            if len(load.ended) < self._num_ranks:
                continue
            if load.measures:
                self.leave(name)
            elif not load.is_over:
                load.is_over = True
                self._counters.add("chunks_prefetched", load.num_chunks)

    def leave(self, request_id: str) -> None:
        """Give back what was fetched for a request that has been loaded, or has ended."""
        load = self._loads.pop(request_id, None)
        if load is not None:
            self._release(load)

    def clear(self) -> None:
        """Give everything back."""
        for request_id in list(self._loads):
            self.leave(request_id)

    def orders(self) -> tuple[list[Fetch], list[int]]:
        """The fetches to begin, and the numbers of those to give back, since the last call."""
        now = self._clock()
        for name, load in list(self._loads.items()):
            if not load.is_over and now - load.since >= self._timeout_s:
                self._give_up(load)
            if now - load.since >= 2 * self._timeout_s:
                self._release(load)
                if load.measures:
                    del self._loads[name]
        begin, self._to_begin = self._to_begin, []
        release, self._to_release = self._to_release, []
        return begin, release

    def _num_held(self) -> int:
        return sum(load.num_chunks for load in self._loads.values() if load.is_held)

    def _give_up(self, load: WaitingLoad) -> None:
        load.is_over = True
        self._counters.add("prefetches_given_up")
        self._throttle.warn(
            "lower tiers did not bring %d chunks to host memory within %g s: their request runs with what is "
            "there",
            load.num_chunks,
            self._timeout_s,
        )

    def _release(self, load: WaitingLoad) -> None:
        if load.is_held:
            load.is_held = False
            self._to_release.append(load.number)
