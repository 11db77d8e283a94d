"""Requests that wait until lower tiers have brought their chunks to host memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from lwkv.integrations.vllm.orders import Fetch, packed
from lwkv.integrations.vllm.reports import RankReport
from lwkv.integrations.vllm.scheduler.lookup.index import RankKeys
from lwkv.integrations.vllm.scheduler.lookup.patience import Wait
from lwkv.integrations.vllm.scheduler.lookup.waiting_load import WaitingLoad
from lwkv.storage.prefetch import CHUNKS_AT_A_TIME
from lwkv.telemetry.counters import Counters
from lwkv.telemetry.log_throttle import LogThrottle

log = logging.getLogger(__name__)


class Wanted(NamedTuple):
    """Chunks [first, end) of a text; `keys` are those of each rank, from the first chunk on.

    Each counts for `room` chunks where these are limited.
    """

    keys: RankKeys
    first: int
    end: int
    room: int = 1


class WaitingLoads:
    """Has the workers fetch chunks for waiting requests, and says for how long each of these waits.

    Chunks are fetched in the order in which requests came, up to a limit for all of them together. A request
    waits as long as its `Wait` says, if it has one, and for `timeout_s` at most; what has been fetched stays
    pinned as long again, and then may be evicted.
    Names are those of requests, or of what else is fetched for one.

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
        self._loads: dict[Hashable, WaitingLoad] = {}
        self._to_begin: list[Fetch] = []
        self._to_release: list[int] = []
        self._last_number = 0
        # Of the loads that are held. Counted, since each request that waits asks for it in each step.
        self._room_held = 0
        self._is_reviewed = False
        self._throttle = LogThrottle(log, clock)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._loads

    def begin(
        self,
        name: Hashable,
        keys: RankKeys,
        first: int,
        end: int,
        most_chunks: int,
        wait: Wait | None = None,
    ) -> None:
        """Have chunks [first, end) of a prompt fetched, no more than `most_chunks` of them.

        Args:
            keys: of each rank, all chunks from the prompt's first on.
            wait: see WaitingLoad.
        """
        self.begin_all(name, [Wanted(keys, first, end)], most_chunks, wait=wait)

    def begin_all(
        self,
        name: Hashable,
        wanted: Sequence[Wanted],
        most_chunks: int,
        since: float | None = None,
        wait: Wait | None = None,
    ) -> None:
        """Have chunks of several texts fetched, the first `most_chunks` of them.

        What was fetched under that name before is given back.

        Args:
            since: when the request began to wait; None for now.
            wait: see WaitingLoad.
        """
        self.leave(name)
        fetches, room, num_chunks = [], most_chunks, 0
        for keys, first, end, each in wanted:
            end = min(end, first + room // each)
            if end > first:
                fetches.append(self._fetch(keys, first, end))
                room -= each * (end - first)
                num_chunks += end - first
        since = self._clock() if since is None else since
        self._loads[name] = WaitingLoad(fetches, num_chunks, most_chunks - room, since, wait=wait)
        self._counters.add("requests_waited")

    def since(self, name: Hashable) -> float | None:
        """When a request began to wait; None for one that has not, or has been loaded since."""
        load = self._loads.get(name)
        return None if load is None else load.since

    def coming(self, name: Hashable) -> list[int]:
        """The numbers of a request's fetches that have not ended."""
        load = self._loads.get(name)
        if load is None or not self._is_coming(load):
            return []
        return [fetch.number for fetch in load.fetches]

    def measure(self, keys: RankKeys, chunk: int, most_chunks: int, tier: str, each: int = 1) -> None:
        """Have a few chunks of a tier fetched for which no request waits; each counts for `each` chunks.

        As many as are fetched together: fewer would be slower, one by one. Not where there is no room, nor
        where some are on their way: these show how fast the tier is.
        """
        end = min(chunk + CHUNKS_AT_A_TIME, min(map(len, keys)))
        room = each * (end - chunk)
        is_too_much = room > most_chunks - self._room_held
        if is_too_much or any(self._shows_speed(load, tier) for load in self._loads.values()):
            return
        fetch = self._fetch(keys, chunk, end, pins=False)
        load = WaitingLoad([fetch], end - chunk, room, self._clock())
        load.is_over = load.measures = True
        self._loads[f"measurement {fetch.number}"] = load
        self._order(load)

    @property
    def num_coming(self) -> int:
        """Chunks that are on their way from lower tiers for requests that wait."""
        coming = [load for load in self._loads.values() if load.is_held and not load.is_over]
        return sum(load.num_chunks - (load.wait.num_there if load.wait else 0) for load in coming)

    def waits(self, name: Hashable, most_chunks: int) -> bool:
        """Whether a request has to wait on. At most `most_chunks` are fetched and kept, for all requests."""
        load = self._loads.get(name)
        if load is None or load.is_over:
            return False
        if not self._is_reviewed:
            self._review()
        if self._clock() - load.since >= self._timeout_s:
            self._give_up(load)
        elif not load.is_ordered and load.room <= most_chunks - self._room_held:
            self._order(load)
        return not load.is_over

    def cut_short(self, name: Hashable) -> Wait | None:
        """The wait of a request that does not wait any more though not all has come; given out once."""
        load = self._loads.get(name)
        if load is None or load.wait is None or load.is_noted or not load.is_over:
            return None
        load.is_noted = True
        self._counters.add("waits_cut_short")
        return load.wait

    def learn(self, report: RankReport) -> None:
        """Take over which fetches have ended on a rank."""
        for name, load in list(self._loads.items()):
            ended = [fetch.number for fetch in load.fetches if fetch.number in report.fetched]
            load.ended.update((report.info.rank, number) for number in ended)
            if not ended or len(load.ended) < self._num_ranks * len(load.fetches):
                continue
            if load.measures:
                self.leave(name)
            elif not load.is_over:
                load.wait = None
                self._end(load)
                self._counters.add("chunks_prefetched", load.num_chunks)

    def leave(self, name: Hashable) -> None:
        """Give back what was fetched for a request that has been loaded, or has ended."""
        load = self._loads.pop(name, None)
        if load is not None:
            self._release(load)

    def clear(self) -> None:
        """Give everything back."""
        for name in list(self._loads):
            self.leave(name)

    def orders(self) -> tuple[list[Fetch], list[int]]:
        """The fetches to begin, and the numbers of those to give back, since the last call."""
        now, self._is_reviewed = self._clock(), False
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

    def _order(self, load: WaitingLoad) -> None:
        """Have the workers fetch and keep what a request waits for."""
        load.is_ordered = load.is_held = True
        self._room_held += load.room
        self._to_begin += load.fetches

    def _give_up(self, load: WaitingLoad) -> None:
        self._end(load)
        self._counters.add("prefetches_given_up")
        self._throttle.warn(
            "lower tiers did not bring %d chunks to host memory within %g s: their request runs with what is "
            "there",
            load.num_chunks,
            self._timeout_s,
        )

    def _review(self) -> None:
        """End the waits of those that are better off without, once a step.

        Where a tier has brought nothing for one of them, they end for all for whom it has brought nothing:
        who goes on waiting while others are computed waits for these as well.
        """
        self._is_reviewed = True
        now = self._clock()
        waits = [(load, load.wait) for load in self._loads.values() if load.wait and not load.is_over]
        over = [(load, wait) for load, wait in waits if wait.is_over(now)]
        frozen = {tier for _, wait in over if wait.is_in_vain for tier in wait.tiers_missing}
        over += [each for each in waits if each[1].is_in_vain and frozen & each[1].tiers_missing]
        for load, _ in over:
            if not load.is_over:
                self._end(load)

    def _end(self, load: WaitingLoad) -> None:
        load.is_over = True
        self._counters.add("waited_us", round(1e6 * (self._clock() - load.since)))

    def _shows_speed(self, load: WaitingLoad, tier: str) -> bool:
        """Whether what is being fetched of a tier shows how fast it is."""
        is_of_tier = load.wait is not None and tier in load.wait.tiers_missing
        return load.measures or (is_of_tier and self._is_coming(load))

    def _is_coming(self, load: WaitingLoad) -> bool:
        return load.is_held and len(load.ended) < self._num_ranks * len(load.fetches)

    def _release(self, load: WaitingLoad) -> None:
        if load.is_held:
            load.is_held = False
            self._room_held -= load.room
            numbers = {fetch.number for fetch in load.fetches}
            unheard = {fetch.number for fetch in self._to_begin} & numbers  # no worker has heard of these
            self._to_begin = [fetch for fetch in self._to_begin if fetch.number not in unheard]
            self._to_release += sorted(numbers - unheard)

    def _fetch(self, keys: RankKeys, first: int, end: int, pins: bool = True) -> Fetch:
        self._last_number += 1
        return Fetch(self._last_number, first, [packed(own[:end]) for own in keys], pins)
