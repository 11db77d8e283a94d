"""Which boundary lower tiers are to bring to host memory for a request, and what of each kind that takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from lwkv.integrations.vllm.hybrid.kind_places import KindChunk, KindPlaces
from lwkv.integrations.vllm.hybrid.rank_tiers import RankTiers
from lwkv.integrations.vllm.scheduler.lookup.costs import Costs
from lwkv.integrations.vllm.scheduler.lookup.patience import Wait
from lwkv.integrations.vllm.scheduler.lookup.waiting_loads import WaitingLoads, Wanted
from lwkv.kinds import KindIndex

log = logging.getLogger(__name__)


class BoundaryFetches:
    """Begins to fetch what a request needs at the boundary that is worth waiting for, if there is any.

    Args:
        index: what is in host memory. ranks: what is below it.
        waiting: has chunks fetched, and says how long a request waits for them.
        costs: of waiting and of computing; None where they are not compared, and all is fetched.
        clock: seconds.
    """

    def __init__(
        self,
        index: KindIndex,
        ranks: RankTiers,
        waiting: WaitingLoads,
        costs: Costs | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index, self._ranks, self._waiting, self._costs = index, ranks, waiting, costs
        self._clock = clock

    def begin(
        self, request_id: str, places: KindPlaces, num_tokens: int, num_local: int, since: float
    ) -> None:
        """Begin for a request of `num_tokens` tokens, of which vLLM has the first `num_local` itself.

        Args:
            since: when the request was asked about first.
        """
        at_once = self._index.boundary(places.hashes, num_tokens, num_local)
        most_room = self._ranks.most_room
        possible = [
            boundary
            for boundary in places.boundaries(num_tokens, num_local)
            if boundary > at_once and self._ranks.room(places.needed(boundary, num_local)) <= most_room
        ]
        if not possible:
            return
        self._ranks.follow(places)
        boundary, wait = self._choose(places, [at_once, *possible], num_local, num_tokens, since)
        if boundary == at_once or (wait is not None and wait.is_over(self._clock())):
            return
        wanted = [
            self._wanted(places, number, chunks) for number, chunks in places.needed(boundary, num_local)
        ]
        self._waiting.begin_all(request_id, wanted, most_room, since, wait)
        if wait is not None:
            log.debug("request %s waits for %d chunks: %s", request_id, wait.num_wanted, wait.estimates)

    def _choose(
        self, places: KindPlaces, ends: Sequence[int], num_local: int, num_tokens: int, since: float
    ) -> tuple[int, Wait | None]:
        """The end to wait for, the first one for none, and for how long."""
        if self._costs is None:
            return ends[-1], None
        below = [[*places.below_host(end, num_local)] for end in ends[1:]]
        brought = [[], *([(each.tier, self._ranks.size(each.kind)) for each in chunks] for chunks in below)]
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
        ranks = self._ranks
        keys = ranks.keys(first.kind, places.hashes[: first.chunk + 1])
        self._waiting.measure(keys, first.chunk, ranks.most_room, first.tier, ranks.pages(first.kind))

    def _wanted(self, places: KindPlaces, number: int, chunks: range) -> Wanted:
        """What is to be fetched of a kind. Tiers learn of full attention from a prompt's first chunk on."""
        pages = self._ranks.pages(number)
        if places.kinds[number].form == "full":
            keys = self._ranks.keys(number, places.hashes[: chunks.stop])
            return Wanted(keys, chunks.start, chunks.stop, pages)
        keys = self._ranks.keys(number, places.hashes[chunks.start : chunks.stop])
        return Wanted(keys, 0, len(chunks), pages)
