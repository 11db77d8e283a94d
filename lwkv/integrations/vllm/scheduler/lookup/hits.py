"""How much of a waiting request's prompt is to be loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from lwkv.integrations.vllm.scheduler.lookup.choice import MUCH, Choice
from lwkv.integrations.vllm.scheduler.lookup.costs import Costs
from lwkv.integrations.vllm.scheduler.lookup.index import ChunkIndex
from lwkv.integrations.vllm.scheduler.lookup.look_ups import LookUps
from lwkv.integrations.vllm.scheduler.lookup.patience import Wait
from lwkv.integrations.vllm.scheduler.lookup.promises import NodePromises
from lwkv.integrations.vllm.scheduler.lookup.waiting_loads import WaitingLoads
from lwkv.integrations.vllm.scheduler.prompt import wants_hits
from lwkv.integrations.vllm.scheduler.request_state import RequestState
from lwkv.storage.tier import HOST

log = logging.getLogger(__name__)

MakeWait: TypeAlias = Callable[[], Wait]


class Hits:
    """Looks chunks up, has lower tiers bring them, and compares the time to load with the time to compute.

    What is in a lower tier is brought to host memory while its request waits, so that no step waits for a
    tier because of another one's load. A request that is alone loads from there while its step computes.
    Where costs are compared, no request waits for a tier, nor for a look-up, for much longer than it would
    take to be computed, and none streams from a tier that was not measured of late.

    Args:
        block_size: tokens of a block of vLLM's block tables.
        loads: whether this vLLM loads anything.
        prefetches: whether requests wait for chunks in lower tiers; if not, steps do.
        waiting: the loads that requests wait for.
        costs: chooses what is worth loading; None to load all that is found.
        is_alone: whether there is only one request that has not ended.
        look_ups: into lower tiers.
        promises: of the owner of host memory; None for memory of the workers' own.
        timeout_s: how long a request may wait for what is on its way to host memory.
    """

    def __init__(
        self,
        index: ChunkIndex,
        block_size: int,
        loads: bool,
        prefetches: bool,
        waiting: WaitingLoads,
        costs: Costs | None,
        is_alone: Callable[[], bool],
        look_ups: LookUps,
        promises: NodePromises | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        self._index = index
        self._block_size = block_size
        self._loads = loads
        self._prefetches = prefetches
        self._waiting = waiting
        self._costs = costs
        self._is_alone = is_alone
        self._look_ups = look_ups
        self._promises = promises
        self._timeout_s = timeout_s

    def waits(self, request_id: str) -> bool:
        """Whether a request has to wait on for what lower tiers bring."""
        return self._waiting.waits(request_id, self._most_prefetched())

    def of(self, tracked: RequestState, num_local: int) -> int | None:
        """Tokens beyond the first `num_local` to load; None while the request is to wait."""
        if tracked.asked_at is None:
            tracked.asked_at = self._index.clock()
        if self._promises is None:
            return self._found(tracked, num_local)
        keys = tracked.chunks.keys(self._index, tracked.chunks.num_tokens)
        first = num_local // tracked.chunks.chunking.chunk_size
        if not self._loads or not wants_hits(tracked.request):
            first = len(keys[0]) if keys else 0  # only what need not be stored is to be known
        self._promises.look_up(tracked.request.request_id, keys, first)
        hit = self._found(tracked, num_local)
        return self._held(tracked, hit, self._promises) if hit else hit

    def _held(self, tracked: RequestState, hit: int, promises: NodePromises) -> int | None:
        """Of `hit` tokens those that the owner of host memory holds, and that lower tiers have.

        None where more are on their way to it: once they are there they are held, too.
        """
        found, request_id = tracked.found, tracked.request.request_id
        chunks = found.chunks_of(hit)
        in_host = [tier == HOST for tier in found.tiers_of(chunks)]
        held = promises.num_held(request_id, chunks, in_host)
        if held == len(chunks):
            return hit
        keys = tracked.chunks.keys(self._index, tracked.chunks.num_tokens)
        has_waited = self._index.clock() - (tracked.asked_at or 0.0) >= self._timeout_s
        if self._index.is_coming(keys, chunks[held]) and not has_waited:
            promises.leave(request_id)
            return None
        return found.usable(chunks.start + held, self._block_size)

    def _found(self, tracked: RequestState, num_local: int) -> int | None:
        if self._prefetches and not self._has_looked_up(tracked):
            return None
        # Looked up where nothing is loaded, too: what some tier has need not be stored again.
        hit = tracked.found.hit(self._index, self._block_size, num_local)
        if not self._loads or not wants_hits(tracked.request) or not hit:
            return 0
        if tracked.request.request_id in self._waiting:
            hit = min(hit, tracked.found.hit_in_host(self._block_size))
        streams, wait = not self._prefetches or self._is_alone(), None
        if hit and self._costs is not None:
            choice, streams = self._choose(tracked, hit, self._costs)
            hit, wait = self._worth_loading(tracked, hit, choice)
        return self._wait_or_load(tracked, hit, streams, wait) if hit and self._prefetches else hit

    def _has_looked_up(self, tracked: RequestState) -> bool:
        """Whether it is known by now what is cached, or the request goes on without knowing all of it."""
        request_id = tracked.request.request_id
        if self._costs is not None and (request_id in self._waiting or self._is_looked_up_late(tracked)):
            self._note_wait(request_id, self._costs)
            tracked.found.look_into_host(self._index)
            return True
        return tracked.found.look_up_aside(self._index, self._look_ups.begin)

    def _is_looked_up_late(self, tracked: RequestState) -> bool:
        """Whether a look-up is under way that takes too long."""
        if self._costs is None or not tracked.found.is_asking:
            return False
        waited_s = self._index.clock() - (tracked.asked_at or 0.0)
        return waited_s >= self._costs.look_up_s(tracked.chunks.num_tokens)

    def _note_wait(self, request_id: str, costs: Costs) -> None:
        """Note where a wait was cut short, and which tiers did not bring what was waited for."""
        wait = self._waiting.cut_short(request_id)
        if wait is not None:
            costs.came_late(wait.tiers_missing, wait.moved_at)
            log.debug(
                "request %s has waited %.1f ms: %d of %d chunks have come from lower tiers; what else it has "
                "is computed",
                *(request_id, 1e3 * (self._index.clock() - wait.since), wait.num_there, wait.num_wanted),
            )

    def _choose(self, tracked: RequestState, hit: int, costs: Costs) -> tuple[Choice, bool]:
        """Which of the chunks of `hit` tokens to load, and whether from lower tiers while its step computes.

        A request that is alone does so where that is much faster than computing: if its tier freezes, all is
        computed after that.
        """
        tiers = tracked.found.tiers_of(tracked.found.chunks_of(hit))
        what = tiers, tracked.found.num_local, tracked.chunks.num_tokens, self._waiting.num_coming
        if not self._prefetches:
            return costs.choose(*what), True
        if self._is_alone() and costs.are_known(tiers):
            choice = costs.choose(*what)
            if choice.seconds <= MUCH * choice.none_s:
                return choice, True
        return costs.choose(*what, waits=True), False

    def _worth_loading(self, tracked: RequestState, hit: int, choice: Choice) -> tuple[int, MakeWait | None]:
        """Of `hit` tokens those that come sooner than they are computed, and what makes the wait for them."""
        found, keys = tracked.found, tracked.chunks.keys(self._index, tracked.chunks.num_tokens)
        chunks, tiers = found.chunks_of(hit), found.tiers_of(found.chunks_of(hit))
        end = chunks.start + choice.num_chunks
        wait: MakeWait | None = None
        # Also where all is in host memory: it may have gone from there when it is loaded.
        tracked.load_within_s = choice.none_s if choice.patience else float("inf")
        tracked.choice = choice if choice.num_chunks < len(chunks) else None
        if choice.measures and self._prefetches and tiers[choice.num_chunks] != HOST:
            self._waiting.measure(keys, end, self._most_prefetched(), tiers[choice.num_chunks])
        if choice.patience is not None and tracked.asked_at is not None:
            is_there = partial(self._index.has, keys)
            what = is_there, chunks.start, tiers[: choice.num_chunks], tracked.asked_at
            wait = partial(Wait, choice.patience, *what)
        return hit if choice.num_chunks == len(chunks) else found.usable(end, self._block_size), wait

    def _wait_or_load(
        self, tracked: RequestState, hit: int, streams: bool, make_wait: MakeWait | None
    ) -> int | None:
        """Of `hit` tokens those to load now; None while the request waits for some of them."""
        request_id, chunks = tracked.request.request_id, tracked.found.chunks_of(hit)
        if streams or tracked.found.are_in_host(chunks):
            return hit
        if request_id not in self._waiting:
            if not self._most_prefetched() and self._costs is None:
                return hit
            keys = tracked.chunks.keys(self._index, tracked.chunks.num_tokens)
            wait = None if make_wait is None else make_wait()
            if wait is not None and wait.is_over(self._index.clock()):
                first, tiers = chunks.start + wait.num_there, tracked.found.tiers_of(chunks)
                self._waiting.measure(keys, first, self._most_prefetched(), tiers[wait.num_there])
                return min(hit, tracked.found.hit_in_host(self._block_size))
            self._waiting.begin(request_id, keys, chunks.start, chunks.stop, self._most_prefetched(), wait)
            if wait is not None:
                log.debug("request %s waits for %d chunks: %s", request_id, len(chunks), wait.estimates)
            if self.waits(request_id):
                return None
        return min(hit, tracked.found.hit_in_host(self._block_size))

    def _most_prefetched(self) -> int:
        """Chunks that may be on their way, or pinned for waiting requests, at a time."""
        return self._index.most_chunks // 2
