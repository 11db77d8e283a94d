"""The scheduler's half: it alone decides what is loaded and what is stored, for all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from lwkv.config.settings import Config
from lwkv.integrations.vllm.blending.orders import BlendOrder, EncodeOrder
from lwkv.integrations.vllm.blending.scheduler.planner import BlendPlanner
from lwkv.integrations.vllm.blending.scheduler.prompt_chunks import segments_of
from lwkv.integrations.vllm.orders import Fetch, Move, StepOrders
from lwkv.integrations.vllm.reports import StepReports
from lwkv.integrations.vllm.scheduler.kv_events import KVEventLog, Removed, Stored
from lwkv.integrations.vllm.scheduler.lookup.costs import Costs
from lwkv.integrations.vllm.scheduler.lookup.hits import Hits
from lwkv.integrations.vllm.scheduler.lookup.index import ChunkIndex
from lwkv.integrations.vllm.scheduler.lookup.look_ups import LookUps
from lwkv.integrations.vllm.scheduler.lookup.parts import LookUpParts
from lwkv.integrations.vllm.scheduler.lookup.promises import NodePromises, Promiser
from lwkv.integrations.vllm.scheduler.lookup.step_costs import StepCosts
from lwkv.integrations.vllm.scheduler.lookup.waiting_loads import WaitingLoads
from lwkv.integrations.vllm.scheduler.moves import Moves
from lwkv.integrations.vllm.scheduler.prompt import is_cacheable, wants_hits
from lwkv.integrations.vllm.scheduler.request_state import RequestState
from lwkv.integrations.vllm.scheduler.requests import Requests
from lwkv.integrations.vllm.scheduler.scheduled import ScheduledRequest
from lwkv.integrations.vllm.scheduler.steps import Steps
from lwkv.integrations.vllm.scheduler.store_policy import StorePolicy
from lwkv.integrations.vllm.scheduler.stores import Stores
from lwkv.storage.tier import HOST
from lwkv.telemetry.counters import Counters
from lwkv.transfer import Chunking


@dataclass(frozen=True, slots=True)
class Role:
    """Which directions this vLLM takes part in: `kv_role`."""

    loads: bool
    stores: bool


class SchedulerSide:
    """Follows vLLM's requests and gives the workers their orders.

    With host memory of the workers' own a lookup takes nothing and changes nothing, so there is nothing to
    release where a request is aborted, preempted or found in vLLM's own cache: chunks are pinned by the
    workers for the step that loads them. If one has gone by then, that load fails, and vLLM computes its
    tokens. Only what was fetched for a waiting request is pinned before, and given back by `waiting`. In the
    memory of a node others evict at any time: what a look-up finds there is held, see NodePromises.

    Args:
        block_size: tokens of a block of vLLM's block tables.
        num_ranks: workers, over tensor and pipeline parallel.
        window: tokens that the model looks back, where blocks behind them are given to others; else None.
        events: writes down what comes and goes; None for not at all.
        most_decoded: tokens that a request gets in a step where it only decodes, drafts included.
        prefetches: whether requests wait for chunks in lower tiers; if not, steps do.
        compares_costs: whether only what loads sooner than it is computed is loaded; if not, all found.
        clock: seconds.
        make_blending: makes what plans blends; None where that is off.
        owner: of the host memory that all engines of a node use; None where workers have their own.
    """

    def __init__(
        self,
        config: Config,
        role: Role,
        index: ChunkIndex,
        block_size: int,
        num_ranks: int = 1,
        window: int | None = None,
        events: KVEventLog | None = None,
        most_decoded: int = 1,
        prefetches: bool = True,
        compares_costs: bool = True,
        clock: Callable[[], float] = time.monotonic,
        make_blending: Callable[[LookUpParts], BlendPlanner] | None = None,
        owner: Promiser | None = None,
    ) -> None:
        self.counters = Counters()
        self._role, self._block_size = role, block_size
        self.index = index
        self._config = config
        self._events = events
        self._counted: dict[str, int] = {}
        self._begun: list[Hashable] = []
        self._epoch = ""
        self._steps = Steps()
        policy = StorePolicy(role.stores, config.save_decode_cache)
        self._requests = Requests(self._new_state, self._steps, policy, block_size, window, most_decoded)
        self._moves = Moves(index, block_size, events)
        self._stores = Stores(index, self._moves, self._requests, policy, self._steps, num_ranks)
        self.waiting = WaitingLoads(num_ranks, config.load_timeout_s, self.counters, clock)
        self.costs = Costs(config.chunk_size, config.use_layerwise, clock) if compares_costs else None
        self._step_costs = StepCosts(self.costs, self.counters)
        # Without host memory of its own a chunk that was fetched would not stay.
        prefetches = prefetches and config.local_cpu
        self.look_ups = LookUps()
        self._promises = None if owner is None else NodePromises(owner, index)
        self.hits = Hits(
            *(index, block_size, role.loads, prefetches, self.waiting, self.costs, self._requests.is_alone),
            *(self.look_ups, self._promises, config.load_timeout_s),
        )
        parts = LookUpParts(index, self.waiting, self.look_ups, self.counters, clock, prefetches)
        self.blending = None if make_blending is None else make_blending(parts)

    def arrived(self, request: Any) -> None:
        """A request has come; it may wait for long before it is asked about."""
        if is_cacheable(request):
            self._follow(request)

    def num_new_matched_tokens(self, request: Any, num_local: int) -> int | None:
        """Tokens beyond the first `num_local` that can be loaded; asked any number of times.

        None while the request is to wait: chunks are on their way to host memory, or another prompt is
        blended in the step that is planned.
        """
        if not is_cacheable(request):
            return 0
        if self.hits.waits(request.request_id):
            return None
        tracked = self._follow(request)
        hit = self.hits.of(tracked, num_local)
        if hit is None or self.blending is None or not (self._role.loads and wants_hits(request)):
            return hit
        blended = self.blending.claim(request, num_local, num_local + hit)
        tracked.blended_from = self.blending.blended_from(request)
        return None if blended is None else max(hit, blended)

    def comes_apart(self, request: Any) -> bool:
        """Whether the tokens that can be loaded come while the request waits, beside the steps of others."""
        return self.blending is not None and self.blending.waits_for_blend(request)

    def blends_ended(self, requests: Collection[str]) -> None:
        """Learn of requests that wait for a blend no longer."""
        if self.blending is not None:
            self.blending.blends_ended(requests)

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], num_loaded: int) -> None:
        """A request has got its blocks and is in this step; `num_loaded` tokens are to be loaded for it.

        Or it has got them for a blend that it waits for; then it gets more when it is in a step.
        """
        if not is_cacheable(request):
            return
        blocks = tables[0]
        is_new = self._requests.find(request.request_id) is None
        tracked = self._follow(request)
        before = None if self.blending is None else self.blending.comes_back(request)
        if before is not None:
            tracked.come_back(blocks, before)
            if is_new:  # a reset came meanwhile: nothing is stored that rests on what was before
                tracked.blended_from = 0
            self._requests.wake(tracked)
            return
        names: list[Hashable] = [request.request_id, segments_of(request.request_id)]
        self._begun += [name for name in names if name in self.waiting]
        if request.request_id in self.waiting or tracked.choice is not None:
            # What lower tiers did not bring in time is computed, and is to be in host memory from then on.
            tracked.found.forget_lower_tiers(num_loaded)
        if self.blending is not None and self.blending.allocated(request, blocks, num_loaded):
            tracked.choice = None
        else:
            self._step_costs.note_load(tracked, num_loaded)
        tracked.begin(blocks, num_loaded, waits=self.comes_apart(request))
        self._requests.wake(tracked)
        if self._promises is not None and not num_loaded:
            self._promises.leave(request.request_id)

    def hit_sources(self, request: Any, num_loaded: int) -> dict[str, int]:
        """By the name of a tier, how many of the tokens that a request is about to load come from it."""
        if self.blending is not None and self.blending.is_planned(request):
            return {HOST: num_loaded}
        tracked = self._requests.find(request.request_id)
        return {} if tracked is None else tracked.found.sources(num_loaded)

    def finished(self, request: Any, blocks: Sequence[int]) -> bool:
        """Whether `blocks`, of a request that has ended, must stay until a step has stored the rest of it."""
        self._requests.finish(request.request_id)
        if self._promises is not None:
            self._promises.leave(request.request_id)
        if self.blending is not None:
            self.blending.stops(request.request_id)
            if self.blending.is_waiting(request):
                return False  # nothing was computed; vLLM keeps its blocks until the blend has ended
        tracked = self._requests.find(request.request_id)
        return tracked is not None and tracked.request is request and self._stores.keeps(tracked, blocks)

    def orders(self, output: Any) -> StepOrders:
        """What the step of vLLM's scheduler output is to load and to store."""
        self._steps.current += 1
        for request_id in self._requests.end(output):
            self.waiting.leave(request_id)
            if self.blending is not None:
                self.blending.end(request_id)
        rests, ended = self._stores.take_rests()
        scheduled = self._requests.scheduled(output)
        blends, encodes = self._blending_orders(scheduled, output)
        within_s = min(
            (item.tracked.load_within_s for item in scheduled if item.tracked.to_load), default=float("inf")
        )
        loads = self._loads(scheduled)
        if self._promises is not None:
            self._promises.end_pass()
        self._requests.pass_step(scheduled)
        stores = self._stores.of_step(scheduled)
        for item in scheduled:
            self._requests.let_sleep(item.tracked, item.in_place)
        # What has not come by now is computed: to read it would only hold up those who compute.
        stopped = [number for name in self._begun for number in self.waiting.coming(name)]
        fetches, released = self._fetches()
        step, acknowledged = self._steps.current, self._steps.acknowledged
        blending = blends or encodes or (self.blending is not None and self.blending.is_under_way)
        is_timed = self._step_costs.begin(step, output, measures=not blending)
        moves, extra = (loads, [*rests, *stores]), (blends, encodes)
        is_empty = not output.num_scheduled_tokens
        given = (step, acknowledged, *moves, ended, fetches, released, is_timed, *extra)
        return StepOrders(*given, is_empty=is_empty, load_within_s=within_s, stopped=stopped)

    def learn(self, reports: StepReports) -> None:
        """Take over what the ranks report of a step."""
        for report in reports.reports:
            self.index.learn(report)
            self.waiting.learn(report)
            self._step_costs.learn(report)
            if self._events is not None:
                self._events.learn(report)
            self._steps.acknowledged = max(self._steps.acknowledged, report.step)
            self._stores.learn(report)
        self._stores.forget_reported()

    def result_came(self) -> None:
        """Note that all was learnt of a step."""
        self._step_costs.result_came()

    def learn_failed_blocks(self, blocks: Set[int]) -> None:
        """Learn which blocks vLLM will compute again. What is behind them depends on them."""
        self._requests.learn_failed_blocks(blocks)
        if blocks and self.blending is not None:
            self.blending.loads_failed()

    def new_counts(self) -> dict[str, int]:
        """What was counted since the last call, and gauges that have changed, as WorkerMeter has them."""
        before, self._counted = self._counted, self.counters.totals()
        news = {name: more for name, count in self._counted.items() if (more := count - before.get(name, 0))}
        return news | self._step_costs.new_gauges()

    def take_events(self) -> Iterable[Stored | Removed]:
        """What came to host memory and went since the last call."""
        return () if self._events is None else self._events.take()

    def close(self) -> None:
        """Close what the scheduler has open."""
        self.look_ups.close()
        if self._promises is not None:
            self._promises.close()
        self.index.close()

    def reset(self) -> None:
        """Find nothing any more that was stored before, nor what is still being stored."""
        # No other process may have the same: it may have other weights, and the same folder.
        self._epoch = uuid4().hex
        self._requests.clear()
        self.waiting.clear()
        self._stores.clear()
        if self._promises is not None:
            self._promises.clear()
        if self.blending is not None:
            self.blending.reset()
        self.index.clear()

    def _follow(self, request: Any) -> RequestState:
        tracked = self._requests.follow(request)
        if self.blending is not None:
            self.blending.follow(request, tracked.chunks.salts)
            # Known there also where the state is a new one, after a reset.
            tracked.blended_from = self.blending.blended_from(request)
        return tracked

    def _new_state(self, request: Any) -> RequestState:
        config = self._config
        chunking = Chunking(config.chunk_size, config.save_unfull_chunk, self.index.tokens_per_row)
        return RequestState.follow(request, chunking, self._epoch)

    def _blending_orders(
        self, scheduled: Sequence[ScheduledRequest], output: Any
    ) -> tuple[list[BlendOrder], list[EncodeOrder]]:
        """What a step blends, which is not loaded otherwise, and what it encodes."""
        blends: list[BlendOrder] = []
        encodes: list[EncodeOrder] = []
        if self.blending is None:
            return blends, encodes
        self.blending.begin_step(output)
        if (begun := self.blending.take_begun()) is not None:
            self._begin_blend(*begun, blends, encodes)
        for item in scheduled:
            tracked, first = item.tracked, item.computed
            if not self.blending.has_segments(tracked.request):
                continue
            blend = self.blending.blend(tracked.request, tracked.chunks.salts, item.blocks())
            if blend is not None:
                blends.append(blend)
                first = tracked.load(item.computed).first
                self._steps.last_load = self._steps.current
            encodes += self._encodes(tracked, item.blocks(), first, item.in_place)
        return blends, encodes

    def _begin_blend(
        self, request: Any, blocks: Sequence[int], blends: list[BlendOrder], encodes: list[EncodeOrder]
    ) -> None:
        """Order the blend of a request that waits for it, and what is encoded in its blocks before."""
        assert self.blending is not None
        tracked = self._follow(request)
        blend = self.blending.blend(request, tracked.chunks.salts, blocks)
        if blend is not None:
            blends.append(blend)
            encodes += self._encodes(tracked, blocks, blend.num_local, blend.end)

    def _encodes(
        self, tracked: RequestState, blocks: Sequence[int], first: int, end: int
    ) -> list[EncodeOrder]:
        """What a step encodes in a request's blocks, whose tokens [first, end) are not there yet."""
        if self.blending is None or not self._role.stores:
            return []
        size = self._block_size
        unread = blocks[-(-first // size) : -(-end // size)]
        return self.blending.encode(tracked.request, tracked.chunks.salts, unread)

    def _loads(self, scheduled: Sequence[ScheduledRequest]) -> list[Move]:
        loads = [self._load(item) for item in scheduled if item.tracked.to_load]
        if loads:
            self._steps.last_load = self._steps.current
        return loads

    def _load(self, item: ScheduledRequest) -> Move:
        tracked, span = item.tracked, item.tracked.load(item.computed)
        move = self._moves.order(tracked, item.blocks(), span)
        if self._promises is None:
            return move
        size = self._config.chunk_size
        chunks = range(span.first // size, -(-span.num_tokens // size))
        return replace(move, promised=self._promises.give(tracked.request.request_id, chunks))

    def _fetches(self) -> tuple[list[Fetch], list[int]]:
        orders = self.waiting.orders()
        # Given back with the next orders, when this step's loads hold the chunks themselves.
        for name in self._begun:
            self.waiting.leave(name)
        self._begun.clear()
        return orders
