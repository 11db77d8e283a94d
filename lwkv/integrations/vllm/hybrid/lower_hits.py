"""What waiting requests get from tiers below host memory, in models with several groups of caches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lwkv.config.settings import Config
from lwkv.hybrid.lower_kinds import tier_setup
from lwkv.integrations.vllm.hybrid.kind_places import (
    KindChunk,
    KindPlaces,
    RankPlaces,
    find_places,
    rank_places,
)
from lwkv.integrations.vllm.hybrid.orders import HybridOrders
from lwkv.integrations.vllm.hybrid.reports import HybridInfo, HybridReport
from lwkv.integrations.vllm.scheduler.lookup.costs import Costs
from lwkv.integrations.vllm.scheduler.lookup.index import Below, RankKeys
from lwkv.integrations.vllm.scheduler.lookup.look_ups import LookUps
from lwkv.integrations.vllm.scheduler.lookup.patience import Wait
from lwkv.integrations.vllm.scheduler.lookup.step_costs import StepCosts
from lwkv.integrations.vllm.scheduler.lookup.tier_lookup import open_lookups
from lwkv.integrations.vllm.scheduler.lookup.waiting_loads import WaitingLoads, Wanted
from lwkv.keys import ChunkKey
from lwkv.kinds import Kind, KindIndex
from lwkv.storage.tier import HOST
from lwkv.telemetry.counters import Counters
from lwkv.telemetry.log_throttle import LogThrottle

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankTiers:
    """A rank, and its lower tiers as the scheduler reaches them."""

    info: HybridInfo
    below: Below

    @property
    def namespaces(self) -> dict[int, str]:
        return {number: kind.namespace for number, kind in self.info.kinds.items()}


@dataclass(slots=True, eq=False)
class Asked:
    """How far a request is.

    Attributes:
        since: when it was asked about first.
        answer: where its chunks are; None where the tiers were not asked.
        is_decided: whether nothing more is brought for it but what it waits for already.
    """

    since: float
    answer: Future[KindPlaces] | None = None
    is_decided: bool = False


class LowerHits:
    """Has lower tiers bring to host memory what a request needs to go on at a boundary, while it waits.

    All kinds of it: each chunk of full attention, the windows and the states of that boundary. What a request
    is promised is pinned by all ranks after that, as if it had been in host memory before.

    A request is looked up once before it runs. It waits for the look-up, and for what comes, no longer than
    `Costs` says, or, where costs are not compared, for `timeout_s`.

    Args:
        kinds, chunk_size: of the model.
        index: what is in host memory.
        compares_costs: whether a request only waits for what comes sooner than it is computed.
        clock: seconds.
        open_below: opens a rank's tiers.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        chunk_size: int,
        index: KindIndex,
        num_ranks: int,
        counters: Counters,
        timeout_s: float,
        open_below: Callable[[HybridInfo], Below],
        compares_costs: bool = True,
        layerwise: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kinds, self._size, self._index = kinds, chunk_size, index
        self._clock = clock
        self._open_below = open_below
        self._counters, self._timeout_s = counters, timeout_s
        self._throttle = LogThrottle(log, clock)
        self._ranks: dict[int, RankTiers] = {}
        self._asked: dict[str, Asked] = {}
        self._look_ups = LookUps()
        self._costs = Costs(chunk_size, layerwise, clock) if compares_costs else None
        self._step_costs = StepCosts(self._costs, counters)
        self._waiting = WaitingLoads(num_ranks, timeout_s, counters, clock)

    def introduce(self, info: HybridInfo) -> None:
        """Learn of a rank. Raises ConfigError where its tiers cannot be opened."""
        known = self._ranks.get(info.rank)
        if known is None or known.info != info:
            if known is not None:
                known.below.close()
            self._ranks[info.rank] = RankTiers(info, self._open_below(info))

    def waits(self, request: Any, hashes: Sequence[bytes], num_local: int) -> bool:
        """Whether a request has to wait: its chunks are looked up in lower tiers, or are being brought.

        Args:
            hashes: of its chunks. num_local: tokens that vLLM has itself.
        """
        request_id = request.request_id
        asked = self._asked.setdefault(request_id, Asked(self._clock()))
        if not asked.is_decided and not self._decide(request, asked, hashes, num_local):
            return True
        if self._waiting.waits(request_id, self._most_room()):
            return True
        self._note_wait(request_id)
        return False

    def leave(self, request_id: str) -> None:
        """Give back what was brought for a request that has been loaded, or has ended."""
        self._asked.pop(request_id, None)
        self._waiting.leave(request_id)

    def added_to(self, orders: HybridOrders, output: Any, loading: Iterable[str]) -> HybridOrders:
        """A step's orders with what is to be fetched, and is not any more, since the last call.

        And whether the workers are to report its end: it is known then how long it took.

        Args:
            loading: requests that load in this step, or that vLLM has given blocks for their load: what has
                not come for them by now is computed.
        """
        fetches, given_back = self._waiting.orders()
        loads = bool(orders.loads or orders.loads_apart)
        return replace(
            orders,
            fetches=fetches,
            stopped=[number for name in loading for number in self._waiting.coming(name)],
            given_back=given_back,
            is_timed=self._step_costs.begin(orders.step, output, measures=not loads),
        )

    def learn(self, report: HybridReport) -> None:
        """Take over what a rank has read, and fetched."""
        found, rank = report.of_lower_tiers(), self._ranks.get(report.info.rank)
        if report.unread is not None and rank is not None:
            rank.below.leave_alone(report.unread)
        self._waiting.learn(found)
        self._step_costs.learn(found)

    def result_came(self) -> None:
        """Note that all was learnt of a step."""
        self._step_costs.result_came()

    def new_gauges(self) -> dict[str, int]:
        """The speeds measured, where they have changed."""
        return self._step_costs.new_gauges()

    def clear(self) -> None:
        """Give everything back."""
        self._asked.clear()
        self._waiting.clear()

    def close(self) -> None:
        """Close the tiers."""
        self._look_ups.close()
        for rank in self._ranks.values():
            rank.below.close()

    def _decide(self, request: Any, asked: Asked, hashes: Sequence[bytes], num_local: int) -> bool:
        """Have a boundary brought, or none; False while it is not known yet where the chunks are."""
        num_tokens = int(request.num_tokens)
        if asked.answer is None and self._needs_no_tier(hashes, num_tokens, num_local):
            asked.is_decided = True
            return True
        answer = asked.answer or self._look_up(hashes, num_tokens)
        asked.answer, asked.is_decided = answer, answer.done() or self._is_late(asked, num_tokens)
        if answer.done() and not answer.cancelled():
            failure = answer.exception()
            if failure is None:
                self._begin(request, asked, answer.result(), num_local)
            else:
                self._counters.add("look_ups_failed")
                self._throttle.warn("a look-up in lower tiers failed, and nothing is loaded: %r", failure)
        return asked.is_decided

    def _needs_no_tier(self, hashes: Sequence[bytes], num_tokens: int, num_local: int) -> bool:
        """Whether lower tiers cannot have more than host memory has, or nobody can be asked."""
        most = max(num_tokens - 1, 0) // self._size * self._size
        is_most = most <= max(num_local, self._index.boundary(hashes, num_tokens, num_local))
        return is_most or not self._index.is_complete

    def _look_up(self, hashes: Sequence[bytes], num_tokens: int) -> Future[KindPlaces]:
        """Find out where the chunks are, on another thread."""
        hashes = [*hashes[: max(num_tokens - 1, 0) // self._size]]  # the list may grow meanwhile
        ranks = [self._places_of(rank, hashes) for rank in self._ranks.values()]
        return self._look_ups.begin(partial(find_places, self._kinds, self._size, hashes, ranks))

    def _is_late(self, asked: Asked, num_tokens: int) -> bool:
        """Whether a look-up is not waited for any more."""
        limit = self._timeout_s if self._costs is None else self._costs.look_up_s(num_tokens)
        return self._clock() - asked.since >= limit

    def _places_of(self, rank: RankTiers, hashes: Sequence[bytes]) -> RankPlaces:
        return rank_places(self._index, rank.info.rank, rank.below, rank.namespaces, hashes)

    def _begin(self, request: Any, asked: Asked, places: KindPlaces, num_local: int) -> None:
        """Have the boundary brought that is worth waiting for, if there is any."""
        num_tokens = int(request.num_tokens)
        at_once = self._index.boundary(places.hashes, num_tokens, num_local)
        possible = [
            boundary
            for boundary in places.boundaries(num_tokens, num_local)
            if boundary > at_once and self._room(places, boundary, num_local) <= self._most_room()
        ]
        if not possible:
            return
        self._follow(places)
        ends = [at_once, *possible]
        boundary, wait = self._choose(places, ends, num_local, num_tokens, asked.since)
        if boundary == at_once or (wait is not None and wait.is_over(self._clock())):
            return
        wanted = [
            self._wanted(places, number, chunks) for number, chunks in places.needed(boundary, num_local)
        ]
        self._waiting.begin_all(request.request_id, wanted, self._most_room(), asked.since, wait)
        if wait is not None:
            log.debug(
                "request %s waits for %d chunks: %s", request.request_id, wait.num_wanted, wait.estimates
            )

    def _choose(
        self, places: KindPlaces, ends: Sequence[int], num_local: int, num_tokens: int, since: float
    ) -> tuple[int, Wait | None]:
        """The end to wait for, the first one for none, and for how long."""
        if self._costs is None:
            return ends[-1], None
        below = [[*places.below_host(end, num_local)] for end in ends[1:]]
        brought = [[], *([(each.tier, self._size_of(each)) for each in chunks] for chunks in below)]
        choice = self._costs.choose_end(ends, brought, num_local, num_tokens, self._waiting.num_coming)
        if choice.measures:
            self._measure(places, below[-1][0])
        if not choice.num_chunks or choice.patience is None:
            return ends[0], None
        chunks = below[choice.num_chunks - 1]
        is_there = partial(self._is_there, places.hashes, chunks)
        wait = Wait(choice.patience, is_there, 0, [each.tier for each in chunks], since)
        if wait.is_over(self._clock()):
            self._measure(places, chunks[0])
        return ends[choice.num_chunks], wait

    def _is_there(self, hashes: Sequence[bytes], chunks: Sequence[KindChunk], number: int) -> bool:
        each = chunks[number]
        return self._index.is_everywhere(each.kind, hashes[each.chunk])

    def _measure(self, places: KindPlaces, first: KindChunk) -> None:
        """Read a few chunks of a tier, to learn how fast it is."""
        keys = self._keys(first.kind, places.hashes[: first.chunk + 1])
        self._waiting.measure(keys, first.chunk, self._most_room(), first.tier, self._pages(first.kind))

    def _note_wait(self, request_id: str) -> None:
        """Note where a wait was cut short, and which tiers did not bring what was waited for."""
        wait = self._waiting.cut_short(request_id)
        if wait is not None and self._costs is not None:
            self._costs.came_late(wait.tiers_missing, wait.moved_at)

    def _wanted(self, places: KindPlaces, number: int, chunks: range) -> Wanted:
        """What is to be fetched of a kind. Tiers learn of full attention from a prompt's first chunk on."""
        if self._kinds[number].form == "full":
            keys = self._keys(number, places.hashes[: chunks.stop])
            return Wanted(keys, chunks.start, chunks.stop, self._pages(number))
        keys = self._keys(number, places.hashes[chunks.start : chunks.stop])
        return Wanted(keys, 0, len(chunks), self._pages(number))

    def _follow(self, places: KindPlaces) -> None:
        """Let tiers know that a prompt's chunks are about to be used: they may wait long for their turn."""
        for kind, own in enumerate(places.tiers):
            below = [chunk for chunk, tier in enumerate(own) if tier not in (None, HOST)]
            if below and self._kinds[kind].form == "full":
                for rank in self._ranks.values():
                    names = rank.namespaces[kind]
                    rank.below.follow([ChunkKey(names, each) for each in places.hashes[: below[-1] + 1]])

    def _keys(self, kind: int, hashes: Sequence[bytes]) -> RankKeys:
        """Of each rank, in their order."""
        names = [self._ranks[rank].namespaces[kind] for rank in sorted(self._ranks)]
        return [[ChunkKey(name, each) for each in hashes] for name in names]

    def _room(self, places: KindPlaces, boundary: int, num_local: int) -> int:
        """Pages of all that is needed at a boundary."""
        needed = places.needed(boundary, num_local)
        return sum(len(chunks) * self._pages(number) for number, chunks in needed)

    def _most_room(self) -> int:
        """Pages that may be on their way, or pinned for waiting requests, at a time."""
        return min(rank.info.max_pages for rank in self._ranks.values()) // 2

    def _pages(self, kind: int) -> int:
        return max(rank.info.kinds[kind].num_pages for rank in self._ranks.values())

    def _size_of(self, each: KindChunk) -> float:
        """How much a chunk is of a usual one."""
        info = next(iter(self._ranks.values())).info
        return info.kinds[each.kind].num_pages / info.usual_pages


def open_below(config: Config, info: HybridInfo) -> Below:
    """Open a rank's lower tiers a second time, for look-ups. Raises ConfigError."""
    kinds = [*info.kinds.values()]
    return open_lookups(tier_setup(config, kinds, info.page_bytes, info.page_format, Counters()))
