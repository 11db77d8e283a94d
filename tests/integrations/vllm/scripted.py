"""A serving engine that is not vLLM and calls the connector's halves as vLLM does, on a model of hashes.

A token's KV in a layer is a hash of what the layer below made of the token, and that is a hash of the KV of
all tokens before it as they stand in the cache: one wrong row makes every later token of the request wrong.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from lwkv.config.settings import Config
from lwkv.engine import CacheEngine
from lwkv.integrations.vllm.orders import StepOrders
from lwkv.integrations.vllm.reports import RankInfo, StepReports
from lwkv.integrations.vllm.scheduler.lookup.index import ChunkIndex
from lwkv.integrations.vllm.scheduler.lookup.tier_lookup import TierLookup, TierLookups
from lwkv.integrations.vllm.scheduler.side import Role, SchedulerSide
from lwkv.integrations.vllm.worker.side import WorkerSide
from lwkv.metadata import CacheMetadata
from lwkv.platforms.cpu import CPU
from lwkv.shared_host.client.promises import OwnerPromises
from lwkv.storage import Tier
from lwkv.telemetry.counters import Counters

LAYERS = 3
BLOCK = 4
CHUNK = 8
VOCABULARY = 1000
BIG = 1 << 20
OWNER_S = 30.0
"""Seconds that an owner of host memory may take."""


def mix(*values: int) -> int:
    """A number below 2**20, exact in float32, that depends on every value and on their order."""
    result = 7
    for value in values:
        result = (result * 1000003 + value + 1) % (2**61 - 1)
    return result % BIG


def expected(tokens: Sequence[int], num_ranks: int) -> int:
    """The token after `tokens`, computed without a cache."""
    below = list(tokens)
    for layer in range(LAYERS):
        rows = [[mix(value, layer, rank) for rank in range(num_ranks)] for value in below]
        totals, below = [0] * num_ranks, []
        for row in rows:
            totals = [mix(total, value) for total, value in zip(totals, row, strict=True)]
            below.append(mix(*totals))
    return below[-1] % VOCABULARY


def _lookups(tiers: Sequence[Tier], _: RankInfo) -> TierLookups:
    """The tiers as the scheduler sees them."""
    return TierLookups([TierLookup(tier, Counters()) for tier in tiers])


@dataclass(eq=False)
class ScriptedRequest:
    """As much of vLLM's Request as the connector looks at, and where it is."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    all_token_ids: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    unseen: list[int] = field(default_factory=list)  # sampled, and not known to the scheduler yet
    is_resumed: bool = False
    restarts: int = 0

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_computed_tokens(self) -> int:
        return self.computed

    @property
    def num_open(self) -> int:
        """Tokens that can be scheduled beyond those that were."""
        has_all = self.num_tokens + len(self.unseen) >= self.num_prompt_tokens + self.max_tokens
        return 0 if has_all else self.num_tokens + len(self.unseen) - self.computed

    def set_back(self, computed: int) -> None:
        """Compute again from `computed` on; what is under way does not count."""
        self.computed = computed
        self.unseen.clear()
        self.restarts += 1


class Blocks:
    """Blocks that keep what was computed into them until they are given to another request."""

    def __init__(self, number: int) -> None:
        self.free = list(range(1, number))  # 0 is no request's
        self.users: dict[int, int] = {}
        self.known: dict[tuple[int, ...], int] = {}

    def hit(self, tokens: Sequence[int]) -> list[int]:
        """The blocks that hold a leading part of `tokens`, never all of it."""
        found: list[int] = []
        for end in range(BLOCK, len(tokens), BLOCK):
            block = self.known.get(tuple(tokens[:end]))
            if block is None:
                break
            found.append(block)
        return found

    def take(self, number: int) -> list[int] | None:
        if number > len(self.free):
            return None
        taken, self.free = self.free[:number], self.free[number:]
        self.known = {tokens: block for tokens, block in self.known.items() if block not in taken}
        for block in taken:
            self.users[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.users[block] = self.users.get(block, 0) + 1
            if block in self.free:
                self.free.remove(block)

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)

    def remember(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        for number, block in enumerate(blocks[: len(tokens) // BLOCK]):
            self.known.setdefault(tuple(tokens[: (number + 1) * BLOCK]), block)


class RankOfModel:
    """One rank's caches, and the worker's half that moves them."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        num_blocks: int,
        host_chunks: int,
        settings: dict[str, Any],
        tiers: Sequence[Tier] = (),
    ) -> None:
        self.rank = rank
        self.caches = {f"layers.{i}": torch.zeros(num_blocks, 1, BLOCK, 2) for i in range(LAYERS)}
        self.rows = {name: cache.numpy() for name, cache in self.caches.items()}
        metadata = CacheMetadata("hashes", LAYERS, 1, 1, torch.float32, tp_size=num_ranks, tp_rank=rank)
        page = CHUNK * 2 * 4
        # A slab's pages are aligned, so memory is counted in the system's pages.
        config = Config(
            chunk_size=CHUNK,
            max_local_cpu_size=host_chunks * LAYERS * max(page, 4096) / 2**30,
            **{"use_layerwise": True} | settings,
        )
        self.engine = CacheEngine.create(
            config, metadata, self.caches, layout_hints={"block_size": BLOCK}, platform=CPU(), tiers=tiers
        )
        self.worker = WorkerSide(self.engine, rank, BLOCK)
        self.fails_at: int | None = None
        self._load_layer = self.engine.connector.loader.load_layer
        self.engine.connector.loader.load_layer = self._load_or_fail  # type: ignore[method-assign]

    def _load_or_fail(self, load: Any, layer: int, *rest: Any) -> None:
        if layer == self.fails_at:
            self.fails_at = None
            raise RuntimeError("the device fails")
        self._load_layer(load, layer, *rest)


@dataclass
class Part:
    """Tokens [begin, end) of a request, computed in one step; of no use once the request was set back."""

    request: ScriptedRequest
    begin: int
    end: int
    blocks: list[int]
    restarts: int


class Result(NamedTuple):
    """What came of a step: the token after each part, blocks that could not be loaded, what ranks report, and
    requests whose blocks all ranks have done with."""

    parts: list[Part]
    sampled: list[int]
    invalid: set[int]
    reports: StepReports | None
    ended: set[str]


class Scripted:
    """The engine; one `step` is one of vLLM's.

    Args:
        budget, most: tokens of a step, and of one request in a step.
        ahead: schedules a step before it knows what came of the one before, as vLLM does on accelerators.
        samples_ahead: ... and before it knows the last token of a request whose next one it schedules.
        shares_failures: has only the first of the requests that share a block compute it again after its load
            has failed, as vLLM does, though the others may then run on garbage. Answers can be wrong.
        lower: tiers below host memory, which all ranks share.
        loads: False for an engine that only stores.
        whole_graphs: a step in which every request gets one token calls no hooks around layers, and says so.
        prefetches: whether requests wait for what is in lower tiers.
        compares_costs: whether only what comes sooner than it is computed is loaded.
        silent: how likely a step calls no hooks and does not say so.
    """

    def __init__(
        self,
        seed: int,
        num_ranks: int = 1,
        num_blocks: int = 40,
        host_chunks: int = 12,
        budget: int = 20,
        most: int = 1000,
        own_cache: bool = True,
        ahead: bool = False,
        samples_ahead: bool = False,
        shares_failures: bool = False,
        lower: Sequence[Tier] = (),
        loads: bool = True,
        whole_graphs: bool = False,
        silent: float = 0.0,
        prefetches: bool = True,
        compares_costs: bool = False,
        **settings: Any,
    ) -> None:
        self.whole_graphs = whole_graphs
        self.silent = silent
        self.random = random.Random(seed)
        self.num_ranks = num_ranks
        self.ranks = [
            RankOfModel(rank, num_ranks, num_blocks, host_chunks, settings, lower)
            for rank in range(num_ranks)
        ]
        config = self.ranks[0].engine.config
        # Without any there is nothing to ask, as in the connector; else a look-up may make a request wait.
        below = partial(_lookups, lower) if lower else None
        index = ChunkIndex(num_ranks, CHUNK, config.save_unfull_chunk, below)
        role = Role(loads, True)
        self.scheduler = SchedulerSide(
            *(config, role, index, BLOCK, num_ranks),
            prefetches=prefetches,
            compares_costs=compares_costs,
            owner=OwnerPromises(config.host_memory, OWNER_S) if config.host_memory else None,
        )
        for rank in self.ranks:
            index.introduce(rank.worker.info)
        self.blocks = Blocks(num_blocks)
        self.budget = budget
        self.most = most
        self.ahead = ahead or samples_ahead
        self.samples_ahead = samples_ahead
        self.shares_failures = shares_failures
        self.in_flight: deque[Result] = deque()
        self.own_cache = own_cache
        self.waiting: list[ScriptedRequest] = []
        self.running: list[ScriptedRequest] = []
        self.finished: set[str] = set()
        self.kept: dict[str, list[int]] = {}  # blocks of requests that have ended
        self.answers: dict[str, list[int]] = {}
        self.loaded = 0
        self.failed = 0
        self.preempted = 0
        self.waits = 0

    def add(self, request: ScriptedRequest) -> None:
        self.waiting.append(request)
        self.scheduler.arrived(request)

    def abort(self, request: ScriptedRequest) -> None:
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
                self._end(request)

    def step(self) -> None:
        """Schedule, compute, and take over what came of this step or, if ahead, of the one before."""
        parts, output = self._schedule()
        if not parts and self.waiting:
            time.sleep(0.001)  # as vLLM does
        self.in_flight.append(self._compute(parts, self.scheduler.orders(output)))
        while len(self.in_flight) > (self.ahead and bool(parts)):
            self._take_over(self.in_flight.popleft())

    def run(self, steps: int = 1000) -> None:
        """Step until all requests have ended."""
        for _ in range(steps):
            if not (self.waiting or self.running or self.in_flight or self.kept):
                return
            self.step()
        raise AssertionError(
            f"{len(self.waiting)} requests wait and {len(self.running)} run after {steps} steps"
        )

    def at_rest(self) -> None:
        """Check that nothing is held."""
        assert not self.kept
        for rank in self.ranks:
            assert rank.engine.flush()
            stats = rank.engine.stats()
            assert (stats["pins"], stats["writes_in_flight"]) == (0, 0)
            kept = 0 if rank.engine.config.host_memory else stats["chunks"]  # that of a node is its owner's
            assert stats["page_references"] == kept * LAYERS

    def close(self) -> None:
        for rank in self.ranks:
            rank.worker.close()
        self.scheduler.close()

    def _schedule(self) -> tuple[list[Part], Any]:
        budget, parts, new, cached = self.budget, [], [], []
        for request in list(self.running):
            number = min(budget, self.most, request.num_open)
            if request not in self.running or number <= 0:
                continue
            blocks = self._more_blocks(request, request.computed + number)
            if blocks is None:
                continue
            cached.append((request, blocks, False))
            parts.append(self._part(request, number))
            budget -= number
        asked = 0
        while asked < len(self.waiting) and budget > 0:
            request = self.waiting[asked]
            hit = self.blocks.hit(request.all_token_ids) if self.own_cache else []
            own = len(hit) * BLOCK
            loaded = self.scheduler.num_new_matched_tokens(request, own)
            if loaded is None:  # it waits, and those behind it do not
                asked += 1
                self.waits += 1
                continue
            assert self.scheduler.num_new_matched_tokens(request, own) == loaded
            number = min(budget, self.most, request.num_tokens - own - loaded)
            assert number > 0
            self.blocks.share(hit)
            more = self.blocks.take(-(-(own + loaded + number) // BLOCK) - len(hit))
            if more is None:
                self.blocks.give_back(hit)
                break
            self.waiting.remove(request)
            self.running.append(request)
            request.blocks, request.computed = [*hit, *more], own + loaded
            self.scheduler.allocated(request, [request.blocks], loaded)
            self.loaded += loaded
            (cached if request.is_resumed else new).append(
                (request, list(request.blocks), request.is_resumed)
            )
            parts.append(self._part(request, number))
            budget -= number
        return parts, self._output(parts, new, cached)

    def _more_blocks(self, request: ScriptedRequest, num_tokens: int) -> list[int] | None:
        while True:
            more = self.blocks.take(-(-num_tokens // BLOCK) - len(request.blocks))
            if more is not None:
                request.blocks += more
                return more
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return None

    def _preempt(self, request: ScriptedRequest) -> None:
        self.preempted += 1
        self.running.remove(request)
        self.blocks.give_back(request.blocks)
        request.blocks, request.is_resumed = [], True
        request.set_back(0)
        self.waiting.insert(0, request)

    def _part(self, request: ScriptedRequest, number: int) -> Part:
        begin = request.computed
        request.computed += number
        if self.own_cache:
            # As vLLM does: others may use these blocks in this very step.
            self.blocks.remember(request.all_token_ids[: request.computed], request.blocks)
        return Part(request, begin, request.computed, list(request.blocks), request.restarts)

    def _output(self, parts: list[Part], new: Any, cached: Any) -> Any:
        running = {id(part.request): part for part in parts}
        cached = [item for item in cached if item[0] in self.running]
        parts[:] = [part for part in parts if part.request in self.running]
        finished, self.finished = self.finished, set()
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=request.request_id,
                    num_computed_tokens=running[id(request)].begin,
                    block_ids=(blocks,),
                )
                for request, blocks, _ in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[request.request_id for request, _, _ in cached],
                num_computed_tokens=[running[id(request)].begin for request, _, _ in cached],
                new_block_ids=[(blocks,) if blocks else None for _, blocks, _ in cached],
                resumed_req_ids={request.request_id for request, _, resumed in cached if resumed},
            ),
            num_scheduled_tokens={part.request.request_id: part.end - part.begin for part in parts},
            finished_req_ids=finished,
        )

    def _compute(self, parts: list[Part], orders: StepOrders) -> Result:
        says_none = self.whole_graphs and all(part.end - part.begin == 1 for part in parts)
        has_hooks = not says_none and not (self.silent and self.random.random() < self.silent)
        for rank in self.ranks:
            rank.worker.begin(orders)
            if orders.step % 2:  # newer engines look up first, and tell the same orders again
                rank.worker.look_up()
                rank.worker.begin(orders)
            if orders.loads:
                rank.worker.start_load(not says_none)
        tokens = [[*part.request.all_token_ids, *part.request.unseen] for part in parts]
        below = [ids[part.begin : part.end] for part, ids in zip(parts, tokens, strict=True)]
        for layer in range(LAYERS):
            name = f"layers.{layer}"
            for rank in self.ranks:
                for part, values in zip(parts, below, strict=True):
                    for t, value in zip(range(part.begin, part.end), values, strict=True):
                        row = mix(value, layer, rank.rank)
                        rank.rows[name][part.blocks[t // BLOCK], 0, t % BLOCK] = row
                if has_hooks:
                    rank.worker.wait_for_layer(name)
            below = [self._attend(part, name) for part in parts]
            for rank in self.ranks:
                if has_hooks:
                    rank.worker.save_layer(name)
        invalid: set[int] = set()
        for rank in self.ranks:
            rank.worker.end()
            invalid |= rank.worker.invalid_blocks()
        sampled = [values[-1] % VOCABULARY for values in below]
        for part, token, ids in zip(parts, sampled, tokens, strict=True):
            if self.samples_ahead and part.end == len(ids):
                part.request.unseen.append(token)
        ended = set.intersection(*(rank.worker.requests_ended() for rank in self.ranks))
        return Result(parts, sampled, invalid, self._reports(), ended)

    def _reports(self) -> StepReports | None:
        """The reports of all ranks that have something to tell."""
        together: StepReports | None = None
        for rank in self.ranks:
            report = rank.worker.report()
            if report is not None:
                alone = StepReports((report,))
                together = alone if together is None else together.aggregate(alone)
        return together

    def _attend(self, part: Part, name: str) -> list[int]:
        totals = [0] * self.num_ranks
        made = []
        for t in range(part.end):
            block, offset = part.blocks[t // BLOCK], t % BLOCK
            rows = [rank.rows[name][block, 0, offset].tolist() for rank in self.ranks]
            totals = [
                mix(total, int(k) if k == v else -1) for total, (k, v) in zip(totals, rows, strict=True)
            ]
            if t >= part.begin:
                made.append(mix(*totals))
        return made

    def _take_over(self, result: Result) -> None:
        if result.reports is not None:
            self.scheduler.learn(result.reports)
        self.scheduler.learn_failed_blocks(result.invalid)
        self.scheduler.result_came()
        self.failed += len(result.invalid)
        if result.invalid:
            self._set_back(result)
        for request_id in result.ended:
            self.blocks.give_back(self.kept.pop(request_id))
        for part, token in zip(result.parts, result.sampled, strict=True):
            request = part.request
            if request in self.running and request.restarts == part.restarts:
                request.is_resumed = False
                if part.end == request.num_tokens:
                    self._append(request, token)

    def _append(self, request: ScriptedRequest, token: int) -> None:
        request.all_token_ids.append(token)
        request.unseen[:1] = []
        if request.num_tokens - request.num_prompt_tokens >= request.max_tokens:
            self.running.remove(request)
            self._end(request)

    def _set_back(self, result: Result) -> None:
        """Have what rests on blocks that were not loaded computed again."""
        if not self.shares_failures:
            self.blocks.known.clear()
        begins = {id(part.request): part.begin for part in result.parts}
        marked: set[int] = set()
        for request in self.running:
            bad = [number for number, block in enumerate(request.blocks) if block in result.invalid]
            if not bad:
                continue
            own = [number for number in bad if request.blocks[number] not in marked]
            marked.update(request.blocks[number] for number in bad)
            before = min(request.computed, begins.get(id(request), request.computed))
            if not self.shares_failures:
                request.set_back(min(before, bad[0] * BLOCK))
            else:
                request.set_back(min(before, own[0] * BLOCK) if own else before)

    def _end(self, request: ScriptedRequest) -> None:
        if self.scheduler.finished(request, request.blocks):
            self.kept[request.request_id] = request.blocks
        else:
            self.blocks.give_back(request.blocks)
        request.blocks = []
        self.finished.add(request.request_id)
        self.answers[request.request_id] = request.all_token_ids[request.num_prompt_tokens :]
