"""The scheduler's half for models with several groups of caches: it decides what is loaded and stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from typing import Any
from uuid import uuid4

from lwkv.errors import ConfigError, LwkvError
from lwkv.integrations.vllm.hybrid.groups import CacheGroups
from lwkv.integrations.vllm.hybrid.lower_hits import LowerHits
from lwkv.integrations.vllm.hybrid.orders import Hashes, HybridOrders, LoadOrder, StoreOrder
from lwkv.integrations.vllm.hybrid.promises import Promises
from lwkv.integrations.vllm.hybrid.reports import HybridInfo, HybridReports
from lwkv.integrations.vllm.hybrid.request import HybridRequest
from lwkv.integrations.vllm.orders import NULL_BLOCK
from lwkv.integrations.vllm.scheduler.prompt import is_cacheable, wants_hits
from lwkv.integrations.vllm.scheduler.side import Role
from lwkv.kinds import KindIndex
from lwkv.storage.tier import HOST
from lwkv.telemetry.counters import Counters

MOST_FAILED = 3
"""Times that what was found could not be pinned, after which a request is computed."""


class HybridScheduler:
    """Follows vLLM's requests and gives the workers their orders.

    What is found is pinned by all ranks before vLLM hears of it: the request waits for a step or two. What
    is in lower tiers is brought to host memory before that, while it waits. All of
    it is loaded in the request's own step, by layers, or, where some layers keep states, in a step before, as
    a whole.

    Args:
        save_decodes: whether generated tokens are stored.
        timeout_s: how long a request waits for the workers' answers.
        clock: seconds.
        make_lower_hits: makes what finds chunks in lower tiers, and has them brought; None where there are
            none.

    Attributes:
        loads_apart: whether requests are loaded before they are scheduled. A state that is loaded in the
            request's own step comes too late: vLLM copies it to the block that the step writes before.
    """

    def __init__(
        self,
        groups: CacheGroups,
        role: Role,
        num_ranks: int = 1,
        save_decodes: bool = False,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        make_lower_hits: Callable[[KindIndex, Counters], LowerHits] | None = None,
    ) -> None:
        self.counters = Counters()
        self.loads_apart = groups.has_states
        self._groups = groups
        self._size = groups.chunk_size.tokens
        self._role = role
        self._save_decodes = save_decodes
        self._index = KindIndex(groups.kinds, self._size, num_ranks)
        self._lower = None if make_lower_hits is None else make_lower_hits(self._index, self.counters)
        self._promises = Promises(num_ranks, timeout_s, self.counters, clock)
        self._requests: dict[str, HybridRequest] = {}
        self._to_store: dict[str, HybridRequest] = {}
        self._to_load: dict[str, HybridRequest] = {}
        # Requests that were here at a reset, and may have blocks from before it.
        self._stale: set[str] = set()
        self._chain = self._epoch = ""
        self._step = 0
        self._counted: dict[str, int] = {}

    def introduce(self, info: HybridInfo) -> None:
        """Learn of a rank. Raises ConfigError where ranks do not name chunks alike."""
        names = (self._chain or info.chain, self._size)
        if (info.chain, info.chunk_size) != names:
            raise ConfigError(
                f"rank {info.rank} has chunks of {info.chunk_size} tokens that are named by {info.chain!r}; "
                f"others have {names[1]} and {names[0]!r}: start all ranks with the same settings"
            )
        self._chain = info.chain
        if self._lower is not None:
            self._lower.introduce(info)
        self._index.introduce(info.rank)

    def arrived(self, request: Any) -> None:
        """A request has come; nothing is to be done before it is asked about."""

    def num_new_matched_tokens(self, request: Any, num_local: int) -> int | None:
        """Tokens beyond the first `num_local` that can be loaded; asked any number of times.

        None while the request is to wait: its chunks are being pinned.
        """
        if not (self._role.loads and is_cacheable(request) and wants_hits(request)):
            return 0
        tracked, request_id = self._follow(request), request.request_id
        promise = self._promises.find(request_id)
        if promise is not None:
            if self._promises.waits(promise):
                return None
            if self._promises.covers(promise, num_local):
                return max(0, promise.order.boundary - num_local)
            tracked.failed += 1
            self._promises.leave(request_id)
        return 0 if tracked.failed >= MOST_FAILED else self._look_up(tracked, num_local)

    def comes_apart(self, request: Any) -> bool:
        """Whether the tokens that can be loaded come before the request is scheduled."""
        return self.loads_apart

    def blends_ended(self, requests: Collection[str]) -> None:
        """Learn of requests that wait for a blend no longer: never any."""

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], num_loaded: int) -> None:
        """A request has got its blocks, of each group; `num_loaded` tokens are to be loaded for it.

        It is in this step, unless it is loaded apart: then it comes again, with nothing to load, when it is.

        Raises LwkvError where vLLM is to load what was not promised.
        """
        if not is_cacheable(request):
            return
        tracked, request_id = self._follow(request), request.request_id
        tracked.begin()
        promise = self._promises.find(request_id)
        if num_loaded:
            local = 0 if promise is None else promise.order.boundary - num_loaded
            if promise is None or not self._promises.covers(promise, local):
                raise LwkvError(f"vLLM takes {num_loaded} tokens of {request_id!r} that were not promised")
            tracked.load = local, promise.order.boundary
            tracked.tables = [list(table) for table in tables] if self.loads_apart else ()
            self._to_load[request_id] = tracked
        else:
            self._leave(request_id)
        if not (num_loaded and self.loads_apart):
            tracked.failed = 0
        if self._role.stores and request_id not in self._stale:
            self._to_store[request_id] = tracked

    def hit_sources(self, request: Any, num_loaded: int) -> dict[str, int]:
        """By the name of a tier, how many of the tokens that a request is about to load come from it."""
        return {HOST: num_loaded}

    def finished(self, request: Any, blocks: Sequence[int]) -> bool:
        """Whether vLLM has to keep the blocks of a request that has ended: never."""
        return False

    def orders(self, output: Any) -> HybridOrders:
        """What the step of vLLM's scheduler output is to load, to store and to pin."""
        self._step += 1
        # Others may have the ids of those that have ended.
        here = {*self._to_load, *(new.req_id for new in output.scheduled_new_reqs)}
        for request_id in set(output.finished_req_ids) - here:
            self._forget(request_id)
        found = list(self._loads(output))
        loads, apart = ([], found) if self.loads_apart else (found, [])
        stores = list(self._stores(output))
        pins, released = self._promises.orders(self._to_load)
        orders = HybridOrders(self._step, loads, stores, pins, released, loads_apart=apart)
        if self._lower is not None:
            orders = self._lower.added_to(orders, output, self._to_load)
        # Released with the next orders, when this step's loads have ended.
        for request_id in self._to_load:
            self._leave(request_id)
        self._to_load.clear()
        return orders

    def learn(self, reports: HybridReports) -> None:
        """Take over what the ranks report of a step."""
        for report in reports.reports:
            self.introduce(report.info)
            for change in report.changes:
                note = self._index.kept if change.is_kept else self._index.dropped
                note(report.info.rank, change.kind, change.hashes)
            self._promises.learn(report)
            if self._lower is not None:
                self._lower.learn(report)
        for request_id in {failed for report in reports.reports for failed in report.failed}:
            if request_id in self._requests:
                self._requests[request_id].failed += 1

    def result_came(self) -> None:
        """Note that all was learnt of a step."""
        if self._lower is not None:
            self._lower.result_came()

    def learn_failed_blocks(self, blocks: Set[int]) -> None:
        """Learn which blocks vLLM will compute again; with several groups vLLM ends before it says so."""

    def new_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        before, self._counted = self._counted, self.counters.totals()
        news = {name: more for name, count in self._counted.items() if (more := count - before.get(name, 0))}
        return news | ({} if self._lower is None else self._lower.new_gauges())

    def take_events(self) -> Iterable[Any]:
        """None: they are refused at the start."""
        return ()

    def close(self) -> None:
        """Close lower tiers."""
        if self._lower is not None:
            self._lower.close()

    def reset(self) -> None:
        """Find nothing any more that was stored before, nor what is still being stored."""
        self._epoch = uuid4().hex
        self._stale.update(self._requests)
        self._requests.clear()
        self._to_store.clear()
        self._promises.clear()
        if self._lower is not None:
            self._lower.clear()
        self._index.clear()

    def _follow(self, request: Any) -> HybridRequest:
        tracked = self._requests.get(request.request_id)
        if tracked is not None and tracked.request is not request:
            # The id of one that has ended: what was promised was for other tokens.
            self._forget(request.request_id)
            tracked = None
        if tracked is None:
            tracked = HybridRequest.follow(request, self._size, self._epoch)
            self._requests[request.request_id] = tracked
        return tracked

    def _forget(self, request_id: str) -> None:
        for requests in (self._requests, self._to_store, self._to_load):
            requests.pop(request_id, None)
        self._stale.discard(request_id)
        self._leave(request_id)

    def _leave(self, request_id: str) -> None:
        """Give back what is pinned for a request, and what was brought for it."""
        self._promises.leave(request_id)
        if self._lower is not None:
            self._lower.leave(request_id)

    def _look_up(self, tracked: HybridRequest, num_local: int) -> int | None:
        """0 where nothing is found; None, and its chunks are to be pinned, where something is.

        None too where it is still being looked for, or brought from lower tiers.
        """
        if self._promises.is_full and tracked.found_behind == num_local:
            return None  # as in the step before: a queue is not looked up as a whole in each step
        num_tokens = int(tracked.request.num_tokens)
        hashes = tracked.hashes.of(self._chain, num_tokens)
        if self._lower is not None and self._lower.waits(tracked.request, hashes, num_local):
            return None
        boundary = self._index.boundary(hashes, num_tokens, num_local)
        tracked.parted_at = self._index.full_hit(hashes, num_tokens, num_local)
        tracked.found_behind = num_local if boundary > num_local else -1
        if boundary <= num_local:
            return 0
        self._promises.begin(
            tracked.request.request_id, hashes[: boundary // self._size], num_local, boundary
        )
        return None

    def _loads(self, output: Any) -> Iterator[LoadOrder]:
        """The loads of requests that are in the step, or in no step before they are loaded."""
        for request_id, tracked in self._to_load.items():
            if self.loads_apart:
                yield from self._load(tracked, tracked.tables)
            elif request_id in output.num_scheduled_tokens:
                yield from self._load(tracked, self._blocks(output, request_id))

    def _load(self, tracked: HybridRequest, tables: Sequence[Sequence[int]]) -> Iterator[LoadOrder]:
        load, tracked.load, tracked.tables = tracked.load, None, ()
        if load is not None:
            request_id, (local, boundary) = tracked.request.request_id, load
            self._require_blocks(request_id, tables, local, boundary)
            hashes = tracked.hashes.of(self._chain, boundary)
            yield LoadOrder(Hashes.of(hashes), local, boundary, tables, request_id)

    def _require_blocks(
        self, request_id: str, tables: Sequence[Sequence[int]], local: int, boundary: int
    ) -> None:
        """Raise LwkvError where vLLM has given no blocks for some of a load."""
        for number, table in zip(self._groups.kind_of, tables, strict=True):
            kind = self._groups.kinds[number]
            first = kind.first_needed(boundary, local) // kind.block_size
            needed = table[first : boundary // kind.block_size]
            if len(needed) < boundary // kind.block_size - first or NULL_BLOCK in needed:
                raise LwkvError(f"vLLM has no blocks for all that {request_id!r} needs of {kind.name} layers")

    def _blocks(self, output: Any, request_id: str) -> Sequence[Sequence[int]]:
        """The request's blocks in this step, of each group, as vLLM has them."""
        return [list(table) for table in output.kv_connector_block_state.get_block_ids(request_id)]

    def _stores(self, output: Any) -> Iterator[StoreOrder]:
        if not self._to_store:
            return
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for request_id, tracked in list(self._to_store.items()):
            scheduled = int(output.num_scheduled_tokens.get(request_id, 0))
            if scheduled:
                yield from self._store(output, tracked, int(computed[request_id]), scheduled)

    def _store(
        self, output: Any, tracked: HybridRequest, computed: int, scheduled: int
    ) -> Iterator[StoreOrder]:
        request_id, limit = tracked.request.request_id, tracked.end_of_stores(self._save_decodes)
        known = min(computed + scheduled, limit)
        # A chunk may end with a draft: that it was right is learnt when tokens behind it have been computed.
        since, end = tracked.learn_known(computed, known), known // self._size * self._size
        if end > tracked.handled and self._chain:
            first = computed if self._groups.has_states else since
            boundaries = self._boundaries(tracked, first, end, end == computed + scheduled)
            hashes, tables = tracked.hashes.of(self._chain, end), self._blocks(output, request_id)
            yield StoreOrder(Hashes.of(hashes), tracked.handled, end, boundaries, tables)
            tracked.handled = end
        if not self._save_decodes and computed + scheduled >= limit:
            del self._to_store[request_id]

    def _boundaries(
        self, tracked: HybridRequest, computed: int, end: int, is_end_of_step: bool
    ) -> frozenset[int]:
        """Where others may go on, of all that is whole at `end`."""
        groups = self._groups
        if not groups.has_states:
            return tracked.boundaries(computed, end, groups.most_looked_back)
        return tracked.state_boundaries(computed, end, groups.state_worth) if is_end_of_step else frozenset()
