"""How much of a waiting request's prompt is to be loaded."""

from __future__ import annotations

from collections.abc import Callable

from lwkv.integrations.vllm.scheduler.lookup.costs import Costs
from lwkv.integrations.vllm.scheduler.lookup.index import ChunkIndex
from lwkv.integrations.vllm.scheduler.lookup.look_ups import LookUps
from lwkv.integrations.vllm.scheduler.lookup.waiting_loads import WaitingLoads
from lwkv.integrations.vllm.scheduler.prompt import wants_hits
from lwkv.integrations.vllm.scheduler.request_state import RequestState
from lwkv.storage.tier import HOST


class Hits:
    """Looks chunks up, has lower tiers bring them, and compares the time to load with the time to compute.

    What is in a lower tier is brought to host memory while its request waits, so that no step waits for a
    tier because of another one's load. A request that is alone loads from there while its step computes.

    Args:
        block_size: tokens of a block of vLLM's block tables.
        loads: whether this vLLM loads anything.
        prefetches: whether requests wait for chunks in lower tiers; if not, steps do.
        waiting: the loads that requests wait for.
        costs: chooses what is worth loading; None to load all that is found.
        is_alone: whether there is only one request that has not ended.
        look_ups: into lower tiers.
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
    ) -> None:
        self._index = index
        self._block_size = block_size
        self._loads = loads
        self._prefetches = prefetches
        self._waiting = waiting
        self._costs = costs
        self._is_alone = is_alone
        self._look_ups = look_ups

    def waits(self, request_id: str) -> bool:
        """Whether a request has to wait on for what lower tiers bring."""
        return self._waiting.waits(request_id, self._most_prefetched())

    def of(self, tracked: RequestState, num_local: int) -> int | None:
        """Tokens beyond the first `num_local` to load; None while the request is to wait."""
        if self._prefetches and not tracked.found.look_up_aside(self._index, self._look_ups.begin):
            return None
        # Looked up where nothing is loaded, too: what some tier has need not be stored again.
        hit = tracked.found.hit(self._index, self._block_size, num_local)
        if not self._loads or not wants_hits(tracked.request):
            return 0
        if hit and self._costs is not None:
            hit = self._worth_loading(tracked, hit, self._costs)
        return self._wait_or_load(tracked, hit) if hit and self._prefetches else hit

    def _worth_loading(self, tracked: RequestState, hit: int, costs: Costs) -> int:
        """Of `hit` tokens those that come sooner than they are computed."""
        chunks, num_tokens = tracked.found.chunks_of(hit), tracked.chunks.num_tokens
        waits = self._prefetches and not self._is_alone()
        tiers, queued = tracked.found.tiers_of(chunks), self._waiting.num_coming
        choice = costs.choose(tiers, tracked.found.num_local, num_tokens, queued, waits)
        tracked.choice = None
        if choice.num_chunks == len(chunks):
            return hit
        tracked.choice, end = choice, chunks.start + choice.num_chunks
        if choice.measures and self._prefetches and tiers[choice.num_chunks] != HOST:
            self._waiting.measure(tracked.chunks.keys(self._index, num_tokens), end, self._most_prefetched())
        return tracked.found.usable(end, self._block_size)

    def _wait_or_load(self, tracked: RequestState, hit: int) -> int | None:
        """Of `hit` tokens those to load now; None while the request waits for some of them."""
        request_id, chunks = tracked.request.request_id, tracked.found.chunks_of(hit)
        if tracked.found.are_in_host(chunks):
            return hit
        if request_id not in self._waiting:
            if self._is_alone() or not self._most_prefetched():
                return hit
            keys = tracked.chunks.keys(self._index, tracked.chunks.num_tokens)
            self._waiting.begin(request_id, keys, chunks.start, chunks.stop, self._most_prefetched())
            if self.waits(request_id):
                return None
        return min(hit, tracked.found.hit_in_host(self._block_size))

    def _most_prefetched(self) -> int:
        """Chunks that may be on their way, or pinned for waiting requests, at a time."""
        return self._index.most_chunks // 2
