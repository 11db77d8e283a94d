"""The scheduler's half: it alone decides what is loaded and what is stored, for all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any
from uuid import uuid4

from lwkv.background.workers import Workers
from lwkv.config.settings import Config
from lwkv.integrations.vllm.orders import NULL_BLOCK, Fetch, Move, StepOrders
from lwkv.integrations.vllm.reports import StepReports
from lwkv.integrations.vllm.scheduler.agenda import Agenda
from lwkv.integrations.vllm.scheduler.costs import Costs, tokens_and_position
from lwkv.integrations.vllm.scheduler.index import ChunkIndex
from lwkv.integrations.vllm.scheduler.kv_events import KVEventLog, Removed, Stored
from lwkv.integrations.vllm.scheduler.prompt import is_cacheable, wants_hits
from lwkv.integrations.vllm.scheduler.request_state import RequestState, Span
from lwkv.integrations.vllm.scheduler.scheduled import ScheduledRequest
from lwkv.integrations.vllm.scheduler.stale_blocks import StaleBlocks
from lwkv.integrations.vllm.scheduler.waiting_loads import WaitingLoads
from lwkv.integrations.vllm.worker.meter import rank_gauge
from lwkv.storage.tier import HOST
from lwkv.telemetry.counters import Counters
from lwkv.transfer import Chunking

log = logging.getLogger(__name__)

FAST_S = 0.002
"""Seconds that a look-up into lower tiers may hold a step up; a request whose takes longer waits for it."""


@dataclass(frozen=True, slots=True)
class Role:
    """Which directions this vLLM takes part in: `kv_role`."""

    loads: bool
    stores: bool


class SchedulerSide:
    """Follows vLLM's requests and gives the workers their orders.

    A lookup takes nothing and changes nothing, so there is nothing to release where a request is aborted,
    preempted or found in vLLM's own cache: chunks are pinned by the workers for the step that loads them. If
    one has gone by then, that load fails, and vLLM computes its tokens.

    With several ranks nothing that was computed beside a load, or behind one that has not been reported yet,
    is stored before all ranks have reported: if one rank's load fails, the others compute on its garbage.

    What is in a lower tier is brought to host memory while its request waits, so that no step waits for a
    tier because of another one's load. A request that is alone loads from there while its step computes.

    Args:
        block_size: tokens of a block of vLLM's block tables.
        num_ranks: workers, over tensor and pipeline parallel.
        window: tokens that the model looks back, where blocks behind them are given to others; else None.
        chronicle: writes down what comes and goes; None for not at all.
        most_decoded: tokens that a request gets in a step where it only decodes, drafts included.
        prefetches: whether requests wait for chunks in lower tiers; if not, steps do.
        weighs: whether only what comes sooner than it is computed is loaded; if not, all that is found.
        clock: seconds.
    """

    def __init__(
        self,
        config: Config,
        role: Role,
        index: ChunkIndex,
        block_size: int,
        num_ranks: int = 1,
        window: int | None = None,
        chronicle: KVEventLog | None = None,
        most_decoded: int = 1,
        prefetches: bool = True,
        weighs: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = Counters()
        self._counted: dict[str, int] = {}
        # Without host memory of its own a chunk that was fetched would not stay.
        self._prefetches = prefetches and config.local_cpu
        self._waiting = WaitingLoads(num_ranks, config.load_timeout_s, self.counters, clock)
        self._look_ups = Workers("scheduler-look-up", 1)
        self._last_look_up: Future[list[str | None]] | None = None
        self._over: set[str] = set()
        self._begun: list[str] = []
        self._costs = Costs(config.chunk_size, config.use_layerwise, clock) if weighs else None
        self._num_loading, self._loads_from_host = 0, True
        self._shown: dict[tuple[str, int], int] = {}
        self.index = index
        self._chronicle = chronicle
        self._config = config
        self._role = role
        self._block_size = block_size
        self._num_ranks = num_ranks
        self._window = window
        self._most_decoded = most_decoded
        self._agenda = Agenda()
        self._tracked: dict[str, RequestState] = {}
        self._ended: list[RequestState] = []
        self._leaving: dict[str, tuple[RequestState, Sequence[int]] | None] = {}
        self._step = 0
        self._acknowledged = 0
        self._last_load = 0
        self._epoch = ""
        self._stale = StaleBlocks(block_size)
        self._cared_for: dict[int, list[tuple[RequestState, int]]] = {}

    def arrived(self, request: Any) -> None:
        """A request has come; it may wait for long before it is asked about."""
        if is_cacheable(request):
            self._follow(request)

    def num_new_matched_tokens(self, request: Any, num_local: int) -> int | None:
        """Tokens beyond the first `num_local` that can be loaded; asked any number of times.

        None while the request is to wait: chunks are on their way to host memory.
        """
        if not is_cacheable(request):
            return 0
        if self._waiting.waits(request.request_id, self._most_prefetched()):
            return None
        tracked = self._follow(request)
        if self._prefetches and not tracked.look_up_aside(self.index, self._look_up):
            return None
        # Looked up where nothing is loaded, too: what some tier has need not be stored again.
        hit = tracked.hit(self.index, self._block_size, num_local)
        if not self._role.loads or not wants_hits(request):
            return 0
        if hit and self._costs is not None:
            hit = self._worth_loading(tracked, hit, self._costs)
        return self._wait_or_load(tracked, hit) if hit and self._prefetches else hit

    def allocated(self, request: Any, blocks: Sequence[int], num_loaded: int) -> None:
        """A request has got its blocks and is in this step; `num_loaded` tokens are to be loaded for it."""
        if not is_cacheable(request):
            return
        tracked = self._follow(request)
        if request.request_id in self._waiting:
            self._begun.append(request.request_id)
        if request.request_id in self._waiting or tracked.choice is not None:
            # What lower tiers did not bring in time is computed, and is to be in host memory from then on.
            tracked.forget_lower_tiers(num_loaded)
        self._note_load(tracked, num_loaded)
        tracked.begin(blocks, num_loaded)
        self._agenda.wake(request.request_id)

    def hit_sources(self, request: Any, num_loaded: int) -> dict[str, int]:
        """By the name of a tier, how many of the tokens that a request is about to load come from it."""
        tracked = self._tracked.get(request.request_id)
        return {} if tracked is None else tracked.sources(num_loaded)

    def finished(self, request: Any, blocks: Sequence[int]) -> bool:
        """Whether `blocks`, of a request that has ended, must stay until a step has stored the rest of it.

        A chunk's key needs all of its token ids. Where vLLM schedules a step before it knows what the one
        before has sampled, the id that fills a chunk is known a step after it was computed.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is not None:
            self._over.add(request.request_id)
        if not self._role.stores or tracked is None or tracked.request is not request:
            return False
        if not tracked.has_rest(self._rest_end(tracked, blocks)):
            return False
        self._leaving[request.request_id] = tracked, list(blocks)
        return True

    def orders(self, output: Any) -> StepOrders:
        """What the step of vLLM's scheduler output is to load and to store."""
        self._step += 1
        self._end_requests(output)
        ended, self._leaving = self._leaving, {}
        rests = [move for item in ended.values() if item is not None for move in self._rest(*item)]
        scheduled = list(self._scheduled(output))
        loads = [
            self._move(item.tracked, item.blocks(), item.tracked.load(item.computed))
            for item in scheduled
            if item.tracked.to_load
        ]
        if loads:
            self._last_load = self._step
        self._stale.pass_step(scheduled)
        stores = self._stores(scheduled) if self._role.stores else []
        for item in scheduled:
            self._let_sleep(item.tracked, item.in_place)
        fetches, released = self._fetches()
        moves, is_timed = (loads, [*rests, *stores]), self._times_step(output)
        return StepOrders(self._step, self._acknowledged, *moves, tuple(ended), fetches, released, is_timed)

    def learn(self, reports: StepReports) -> None:
        """Take over what the ranks report of a step."""
        for report in reports.reports:
            self.index.learn(report)
            self._waiting.learn(report)
            if self._costs is not None:
                self._costs.learn(report)
            if self._chronicle is not None:
                self._chronicle.learn(report)
            self._acknowledged = max(self._acknowledged, report.step)
            for tracked, cared_for in () if report.stored else self._cared_for.get(report.step, ()):
                tracked.cared_for = min(tracked.cared_for, cared_for)
                self._wake([tracked])
        for step in [step for step in self._cared_for if step <= self._acknowledged]:
            del self._cared_for[step]

    def result_came(self) -> None:
        """Note that all was learnt of a step."""
        if self._costs is not None:
            self._costs.result_came()

    def learn_failed_blocks(self, blocks: Set[int]) -> None:
        """Learn which blocks vLLM will compute again. What is behind them depends on them."""
        self._stale.add(blocks)
        if blocks:  # vLLM sets requests back
            self._wake(self._tracked.values())
        for tracked in (*self._tracked.values(), *self._ended) if blocks else ():
            first = next((i for i, block in enumerate(tracked.blocks) if block in blocks), None)
            if first is not None:
                self._stale.add(tracked.blocks[first:])

    def new_counts(self) -> dict[str, int]:
        """What was counted since the last call, and gauges that have changed, as WorkerMeter has them."""
        before, self._counted = self._counted, self.counters.totals()
        news = {name: more for name, count in self._counted.items() if (more := count - before.get(name, 0))}
        known, self._shown = self._shown, {} if self._costs is None else self._costs.gauges()
        return news | (
            {} if known == self._shown else {rank_gauge(*name): n for name, n in self._shown.items()}
        )

    def take_events(self) -> Iterable[Stored | Removed]:
        """What came to host memory and went since the last call."""
        return () if self._chronicle is None else self._chronicle.take()

    def close(self) -> None:
        """Close what the scheduler has open."""
        self._look_ups.leave()
        self.index.close()

    def reset(self) -> None:
        """Find nothing any more that was stored before, nor what is still being stored."""
        # No other process may have the same: it may have other weights, and the same folder.
        self._epoch = uuid4().hex
        for request_id in self._tracked:
            self._agenda.leave(request_id)
        self._tracked.clear()
        self._over.clear()
        self._waiting.clear()
        self._leaving = dict.fromkeys(self._leaving)
        self.index.clear()

    def _wait_or_load(self, tracked: RequestState, hit: int) -> int | None:
        """Of `hit` tokens those to load now; None while the request waits for some of them."""
        request_id, chunks = tracked.request.request_id, tracked.chunks_of(hit)
        if tracked.are_in_host(chunks):
            return hit
        if request_id not in self._waiting:
            if self._is_alone() or not self._most_prefetched():
                return hit
            keys = tracked.keys(self.index, int(tracked.request.num_tokens))
            self._waiting.begin(request_id, keys, chunks.start, chunks.stop, self._most_prefetched())
            if self._waiting.waits(request_id, self._most_prefetched()):
                return None
        return min(hit, tracked.hit_in_host(self._block_size))

    def _look_up(self, look_up: Callable[[], list[str | None]]) -> Future[list[str | None]]:
        """Look into lower tiers on another thread; a fast one that is idle has answered on return."""
        is_idle = self._last_look_up is None or self._last_look_up.done()
        self._last_look_up = self._look_ups.submit(look_up)
        if is_idle:
            wait([self._last_look_up], FAST_S)
        return self._last_look_up

    def _worth_loading(self, tracked: RequestState, hit: int, costs: Costs) -> int:
        """Of `hit` tokens those that come sooner than they are computed."""
        chunks, num_tokens = tracked.chunks_of(hit), int(tracked.request.num_tokens)
        waits = self._prefetches and not self._is_alone()
        tiers, queued = tracked.tiers_of(chunks), self._waiting.num_coming
        choice = costs.choose(tiers, tracked.num_local, num_tokens, queued, waits)
        tracked.choice = None
        if choice.num_chunks == len(chunks):
            return hit
        tracked.choice, end = choice, chunks.start + choice.num_chunks
        if choice.measures and self._prefetches and tiers[choice.num_chunks] != HOST:
            self._waiting.measure(tracked.keys(self.index, num_tokens), end, self._most_prefetched())
        return tracked.usable(end, self._block_size)

    def _note_load(self, tracked: RequestState, num_loaded: int) -> None:
        """Note what a request loads in the next step, and what was chosen not to be loaded."""
        if num_loaded:
            self._num_loading += num_loaded
            self._loads_from_host &= tracked.are_in_host(tracked.chunks_of(num_loaded))
        choice, tracked.choice = tracked.choice, None
        if choice is not None:
            self.counters.add("requests_cheaper_to_compute")
            log.debug(
                "request %s: %d cached tokens are loaded; the prompt takes about %.1f ms so, %.1f ms if all "
                "that is cached were loaded, and %.1f ms if nothing",
                *(tracked.request.request_id, num_loaded),
                *(1e3 * choice.seconds, 1e3 * choice.all_s, 1e3 * choice.none_s),
            )

    def _times_step(self, output: Any) -> bool:
        """Whether the workers are to report the step's end, to measure how long it took."""
        loading, self._num_loading = self._num_loading, 0
        from_host, self._loads_from_host = self._loads_from_host, True
        if self._costs is None:
            return False
        tokens, position = tokens_and_position(output)
        return self._costs.begin_step(self._step, tokens, position, loading, from_host)

    def _is_alone(self) -> bool:
        """Whether there is only one request that has not ended."""
        return len(self._tracked) - len(self._over) == 1

    def _most_prefetched(self) -> int:
        """Chunks that may be on their way, or pinned for waiting requests, at a time."""
        return self.index.most_chunks // 2

    def _fetches(self) -> tuple[list[Fetch], list[int]]:
        orders = self._waiting.orders()
        # Given back with the next orders, when this step's loads hold the chunks themselves.
        for request_id in self._begun:
            self._waiting.leave(request_id)
        self._begun.clear()
        return orders

    def _follow(self, request: Any) -> RequestState:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:
            config = self._config
            chunking = Chunking(config.chunk_size, config.save_unfull_chunk, self.index.tokens_per_row)
            tracked = RequestState.follow(request, chunking, self._epoch)
            self._tracked[request.request_id] = tracked
        return tracked

    def _end_requests(self, output: Any) -> None:
        """Follow requests no more that have ended; of one whose name is used again, the next."""
        if self._last_load <= self._acknowledged:
            self._ended.clear()
        self._over.clear()
        again = {new.req_id for new in output.scheduled_new_reqs}
        for request_id in set(output.finished_req_ids) - again:
            tracked = self._tracked.pop(request_id, None)
            self._agenda.leave(request_id)
            self._waiting.leave(request_id)
            if tracked is not None:
                # A load may still fail on which it has computed.
                self._ended.append(tracked)

    def _scheduled(self, output: Any) -> Iterator[ScheduledRequest]:
        """The step's requests that have something to do, with their blocks as they are now."""
        self._follow_blocks(output)
        awake = self._agenda.begin_step(self._step)
        for new in output.scheduled_new_reqs:
            yield from self._part(output, new.req_id, new.num_computed_tokens, True)
        cached = output.scheduled_cached_reqs
        if not awake and not len(self._stale):
            return
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in awake or len(self._stale):
                anew = request_id in cached.resumed_req_ids
                yield from self._part(output, request_id, computed, anew)

    def _follow_blocks(self, output: Any) -> None:
        """Take over the blocks that requests got in this step: few of those that run get any."""
        for new in output.scheduled_new_reqs:
            self._add_blocks(new.req_id, new.block_ids, True)
        cached = output.scheduled_cached_reqs
        for request_id in cached.resumed_req_ids:
            self._add_blocks(request_id, None, True)
        with_blocks = compress(cached.req_ids, cached.new_block_ids)
        for request_id, blocks in zip(with_blocks, filter(None, cached.new_block_ids), strict=True):
            self._add_blocks(request_id, blocks, False)

    def _add_blocks(self, request_id: str, blocks: Any, anew: bool) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.blocks = [] if anew else tracked.blocks
            tracked.blocks += blocks[0] if blocks else ()

    def _part(self, output: Any, request_id: str, computed: int, anew: bool) -> Iterator[ScheduledRequest]:
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        in_place = computed + int(output.num_scheduled_tokens.get(request_id, 0))
        begin = computed - tracked.to_load
        written = tracked.blocks[begin // self._block_size : -(-in_place // self._block_size)]
        is_touched = self._stale.concern(-1 if anew else tracked.tested_after, written)
        if tracked.is_settled(computed, self._storable(tracked, in_place)) and not is_touched:
            self._let_sleep(tracked, in_place)
            return
        state = getattr(output, "kv_connector_block_state", None)
        yield ScheduledRequest(
            tracked, begin, computed, in_place, partial(self._blocks, tracked, state, computed)
        )

    def _let_sleep(self, tracked: RequestState, in_place: int) -> None:
        """Look at a request again when it may have something to do."""
        steps = tracked.steps_asleep(in_place, self._config.save_decode_cache, self._most_decoded)
        if not self._role.stores and not tracked.to_load:
            steps = None
        if steps != 0:
            until = None if steps is None else self._step + 1 + steps
            self._agenda.sleep(tracked.request.request_id, until)

    def _wake(self, requests: Iterable[RequestState]) -> None:
        for tracked in requests:
            request_id = tracked.request.request_id
            if self._tracked.get(request_id) is tracked:
                self._agenda.wake(request_id)

    def _blocks(self, tracked: RequestState, state: Any, computed: int) -> Sequence[int]:
        """The request's blocks: from vLLM 0.30 on its own word, before that what was followed."""
        given = None if state is None else state.get_block_ids(tracked.request.request_id)
        if given is not None:
            return given[0]  # type: ignore[no-any-return]
        gone = 0 if self._window is None else max(0, computed - self._window + 1) // self._block_size
        return [NULL_BLOCK] * min(gone, len(tracked.blocks)) + tracked.blocks[gone:]

    def _stores(self, scheduled: Sequence[ScheduledRequest]) -> list[Move]:
        before = [(item.tracked, item.tracked.cared_for) for item in scheduled]
        stores = [
            self._move(item.tracked, item.blocks(), span)
            for item in scheduled
            for span in self._to_store(item)
        ]
        if stores:
            self._cared_for[self._step] = before
        return stores

    def _rest(self, tracked: RequestState, blocks: Sequence[int]) -> list[Move]:
        """What is left to store of a request that has ended; its blocks are still its own."""
        in_place = min(self._rest_end(tracked, blocks), self._stale.sound_tokens(blocks))
        if self._num_ranks > 1 and self._last_load > self._acknowledged:
            in_place = min(in_place, tracked.sound)
        if not tracked.has_rest(in_place):
            return []
        return [self._move(tracked, blocks, span) for span in tracked.store_rest(self.index, in_place)]

    def _rest_end(self, tracked: RequestState, blocks: Sequence[int]) -> int:
        """Tokens of a request that has ended whose KV is in `blocks`, of those that are to be stored."""
        # The last token was sampled; what stands in its place may be that of a draft.
        known, computed = int(tracked.request.num_tokens) - 1, int(tracked.request.num_computed_tokens)
        return self._storable(tracked, min(known, computed, len(blocks) * self._block_size))

    def _move(self, tracked: RequestState, blocks: Sequence[int], span: Span) -> Move:
        move = tracked.move(self.index, span, blocks, self._block_size)
        if self._chronicle is not None and move.keys:
            lora = getattr(tracked.request, "lora_request", None)
            keys = tracked.keys(self.index, span.num_tokens)[0]
            self._chronicle.expect(move, keys, None if lora is None else str(lora.lora_name))
        return move

    def _to_store(self, item: ScheduledRequest) -> list[Span]:
        tracked = item.tracked
        if self._num_ranks > 1 and self._last_load > self._acknowledged:
            tracked.sound = min(tracked.sound, item.computed)
        else:
            tracked.sound = item.in_place
        in_place = min(self._storable(tracked, item.in_place), tracked.sound)
        if tracked.spoiled_from is not None:
            in_place = min(in_place, tracked.spoiled_from)
        return tracked.store(self.index, item.computed, in_place)

    def _storable(self, tracked: RequestState, in_place: int) -> int:
        """Those of the first `in_place` tokens that are to be stored at all."""
        if not self._role.stores:
            return 0
        if self._config.save_decode_cache:
            # What comes after the known tokens are drafts, or ids that are still being sampled.
            return min(in_place, int(tracked.request.num_tokens))
        return min(in_place, int(tracked.request.num_prompt_tokens))
