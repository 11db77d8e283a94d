"""The scheduler's half over workers, a model and a tier that only take time, by a clock of their own.

Times are about those of an 8B model on a large GPU. Nothing sleeps: a second here takes some milliseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from integrations.vllm.scripted import ScriptedRequest
from storage.rig import Clock

from lwkv.config.settings import Config
from lwkv.integrations.vllm.orders import Fetch, Move, StepOrders, unpacked
from lwkv.integrations.vllm.reports import RankInfo, RankReport, StepReports
from lwkv.integrations.vllm.scheduler.lookup.index import ChunkIndex
from lwkv.integrations.vllm.scheduler.lookup.look_ups import LookUps
from lwkv.integrations.vllm.scheduler.side import Role, SchedulerSide
from lwkv.keys import ChunkKey
from lwkv.storage.prefetch import CHUNKS_AT_A_TIME, GROUPS_AT_ONCE

CHUNK, BLOCK, LAYERS = 256, 16, 32
CHUNK_BYTES = CHUNK * 128 * 1024
IDLE_S = 0.001
"""A step in which nothing is scheduled."""
TIER = "store"
FROZEN_S = 30.0
"""What takes longer to read does not come."""


@dataclass(frozen=True)
class Model:
    """Seconds of a step: in any case, for each token, for each token and token before it, and of a load."""

    step_s: float = 0.005
    token_s: float = 24e-6
    attention_s: float = 4.2e-10
    host_token_s: float = 2.6e-6

    def seconds(self, parts: Sequence[tuple[int, int]], num_loaded: int = 0) -> float:
        """Of a step that computes tokens [first, end) of each part, and loads so many."""
        tokens = sum(end - first for first, end in parts)
        pairs = sum((end - first) * (end + first) / 2 for first, end in parts)
        compute = self.step_s + tokens * self.token_s + pairs * self.attention_s
        return max(compute, num_loaded * self.host_token_s)


@dataclass
class Group:
    keys: list[ChunkKey]
    missing: int
    asked: float
    fetch: FetchUnderWay | None
    ends: list[float]  # of each layer


@dataclass(eq=False)
class FetchUnderWay:
    number: int
    keys: list[ChunkKey]
    next: int
    most: int = 1
    groups: int = 0
    is_released: bool = False
    is_over: bool = False


@dataclass
class Tier:
    """Reads one layer of some chunks after the other.

    Attributes:
        speed: bytes a second, by the time; above 0.
        latency_s: until the first byte of what is asked for.
        has: the chunks that it has, of each rank.
    """

    speed: Callable[[float], float]
    latency_s: float = 0.0002
    has: set[bytes] = field(default_factory=set)
    free_at: float = 0.0

    def read(self, num_bytes: float, asked: float) -> float:
        """When so many bytes have come."""
        now, tick = max(self.free_at, asked + self.latency_s), 0.002
        while num_bytes > (in_tick := self.speed(now) * tick) and now < asked + FROZEN_S:
            now, num_bytes = now + tick, num_bytes - in_tick
        self.free_at = now + num_bytes / self.speed(now)
        return self.free_at


class Worker:
    """One rank: fetches as Prefetches does, which test_simulated.py compares it with, and reports.

    But what was asked for is read to its end: where it is not wanted any more, Prefetches cancels the calls
    that have not begun.

    Attributes:
        num_read: chunks that its tier was asked for.
        in_vain: chunks that were read when nobody wanted them any more.
    """

    def __init__(self, rank: int, tier: Tier) -> None:
        self.info = RankInfo(rank, f"model{rank}", 1, LAYERS, CHUNK_BYTES // LAYERS, most_chunks=400)
        self.tier = tier
        self.num_read = 0
        self.kept: set[bytes] = set()
        self.in_vain = 0
        self._waiting: deque[FetchUnderWay] = deque()
        self._open: dict[int, FetchUnderWay] = {}
        self._under_way: list[Group] = []
        self._new: list[bytes] = []
        self._ended: list[int] = []
        self._read, self._read_s, self._read_until = 0.0, 0.0, 0.0

    def begin(self, orders: StepOrders, now: float) -> None:
        for number in orders.released:
            self._open.pop(number, FetchUnderWay(0, [], 0)).is_released = True
        for fetch in orders.fetches:
            self._begin(fetch)
        for number in orders.stopped:
            self._stop(self._open[number])
        self._ask(now)

    def load(self, move: Move, now: float) -> float:
        """Until when a step waits for what is not in host memory of what it loads."""
        keys = unpacked(*move.keys[self.info.rank])[move.first // CHUNK :]
        missing = [key for key in keys if key.hash not in self.kept]
        if missing:
            self._under_way.append(self._group(missing, now, None))
        return self._under_way[-1].ends[-1] if missing else now

    def pass_until(self, now: float) -> None:
        """Let the tier read on."""
        while self._under_way and (group := min(self._under_way, key=_end)).ends[-1] <= now:
            self._under_way.remove(group)
            self._end(group)
            self._ask(group.ends[-1])

    def report(self, step: int, now: float) -> RankReport:
        self._note_reads(now)
        read = {TIER: (round(self._read), self._read_s)} if self._read else {}
        report = RankReport(self.info, step, kept=self._new, fetched=self._ended, read=read)
        self._new, self._ended, self._read, self._read_s = [], [], 0.0, 0.0
        return report

    def _begin(self, fetch: Fetch) -> None:
        under_way = FetchUnderWay(fetch.number, unpacked(*fetch.keys[self.info.rank]), fetch.first)
        self._open[fetch.number] = under_way
        self._waiting.append(under_way)

    def _stop(self, fetch: FetchUnderWay) -> None:
        del fetch.keys[fetch.next :]
        if not fetch.groups:
            self._ended.append(fetch.number)

    def _ask(self, now: float) -> None:
        while self._waiting:
            fetch = self._waiting[0]
            while not fetch.is_released and fetch.next < len(fetch.keys) and fetch.groups < fetch.most:
                keys = fetch.keys[fetch.next : fetch.next + CHUNKS_AT_A_TIME]
                fetch.next, fetch.groups = fetch.next + len(keys), fetch.groups + 1
                self._under_way.append(self._group(keys, now, fetch))
            if not fetch.is_released and fetch.next < len(fetch.keys):
                return
            self._waiting.popleft()

    def _group(self, keys: list[ChunkKey], now: float, fetch: FetchUnderWay | None) -> Group:
        missing = sum(key.hash not in self.kept for key in keys)
        each = CHUNK_BYTES / LAYERS * missing
        self.num_read += missing
        ends = [self.tier.read(each, now) if each else now for _ in range(LAYERS)]
        return Group(keys, missing, now, fetch, ends)

    def _end(self, group: Group) -> None:
        self._note_read(group, group.ends[-1])
        fetch = group.fetch
        if fetch is None:
            return
        if fetch.is_released:
            self.in_vain += group.missing
            return
        fetch.groups, fetch.most = fetch.groups - 1, min(2 * fetch.most, GROUPS_AT_ONCE)
        self._new += [key.hash for key in group.keys if key.hash not in self.kept]
        self.kept.update(key.hash for key in group.keys)
        if not fetch.groups and fetch.next == len(fetch.keys):
            self._ended.append(fetch.number)

    def _note_reads(self, now: float) -> None:
        for group in sorted(self._under_way, key=_end):
            self._note_read(group, now)

    def _note_read(self, group: Group, now: float) -> None:
        """As BusyTime: calls beside each other are counted once."""
        for end in [end for end in group.ends if self._read_until < end <= now]:
            self._read += CHUNK_BYTES / LAYERS * group.missing
            self._read_s += end - max(self._read_until, group.asked)
            self._read_until = end


def _end(group: Group) -> float:
    return group.ends[-1]


class Below:
    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def find(self, keys: Sequence[ChunkKey]) -> list[str | None]:
        return [TIER if key.hash in self._tier.has else None for key in keys]

    def leave_alone(self, tiers: Mapping[str, float]) -> None:
        pass

    def follow(self, prompt: Sequence[ChunkKey]) -> None:
        pass

    def close(self) -> None:
        pass


class TimedLookUps(LookUps):
    """Look-ups that take as long as they are said to."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.seconds = 0.0
        self._clock = clock
        self._coming: list[tuple[float, Future[Any], Callable[[], Any]]] = []

    def begin(self, look_up: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._coming.append((self._clock.now + self.seconds, future, look_up))
        self.pass_time()
        return future

    def pass_time(self) -> None:
        for item in [item for item in self._coming if item[0] <= self._clock.now]:
            self._coming.remove(item)
            item[1].set_result(item[2]())


@dataclass(eq=False)
class Asked:
    """A request, when it came, and when its first token came."""

    request: ScriptedRequest
    came: float
    cached: int = 0
    ttft_s: float | None = None


class Simulation:
    """The engine, which schedules first come, first served.

    Args:
        tiers: of each rank.
        compares: whether loading is weighed against computing.
        decoders: requests that decode all the time.
        budget: tokens of a step.
    """

    def __init__(
        self, tiers: Sequence[Tier], compares: bool = True, decoders: int = 16, budget: int = 16384
    ) -> None:
        self.clock = Clock()
        self.model, self._budget = Model(), budget
        self.workers = [Worker(rank, tier) for rank, tier in enumerate(tiers)]
        config = Config(chunk_size=CHUNK, max_local_cpu_size=1.0, use_layerwise=True)
        index = ChunkIndex(len(tiers), CHUNK, False, lambda info: Below(tiers[info.rank]), self.clock)
        self.scheduler = SchedulerSide(
            *(config, Role(True, False), index, BLOCK, len(tiers)), compares_costs=compares, clock=self.clock
        )
        self.look_ups = TimedLookUps(self.clock)
        self.scheduler.look_ups = self.scheduler.hits._look_ups = self.look_ups
        for worker in self.workers:
            index.introduce(worker.info)
        self._number = 0
        self._waiting: list[Asked] = []
        self._running: list[Asked] = []
        self._finished: set[str] = set()
        self._decoders: list[ScriptedRequest] = []
        for _ in range(decoders):
            self._decode()

    def ask(self, seed: int, num_tokens: int) -> Asked:
        """A prompt; those of one seed begin with the same tokens."""
        self._number += 1
        tokens = [(seed * 7919 + i * i) % 50_000 for i in range(num_tokens)]
        asked = Asked(ScriptedRequest(f"r{self._number}", tokens, 1), self.clock.now)
        self._waiting.append(asked)
        self.scheduler.arrived(asked.request)
        return asked

    def put(self, seed: int, num_tokens: int) -> None:
        """Have a prompt's chunks in the tiers, and nowhere else."""
        asked = self.ask(seed, num_tokens)
        self._waiting.remove(asked)
        tracked = self.scheduler._requests.follow(asked.request)
        for worker, keys in zip(
            self.workers, tracked.chunks.keys(self.scheduler.index, num_tokens), strict=True
        ):
            worker.tier.has.update(key.hash for key in keys)
        self._finish(asked.request)

    def answer(self, *asked: Asked) -> list[float]:
        """Step until these have their first token; their times to it."""
        for _ in range(5000):
            if all(each.ttft_s is not None for each in asked):
                return [each.ttft_s or 0.0 for each in asked]
            self.step()
        raise AssertionError("no answer after 5000 steps")

    def run_for(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.step()

    def step(self) -> None:
        self.look_ups.pass_time()
        parts, new, loaded = self._schedule()
        output = self._output(parts, new)
        orders = self.scheduler.orders(output)
        now = self.clock.now
        for worker in self.workers:
            worker.begin(orders, now)
        loads_until = max([w.load(move, now) for w in self.workers for move in orders.loads], default=now)
        computed = [(first, end) for _, first, end in parts] + [(1000, 1001) for _ in self._decoders]
        seconds = self.model.seconds(computed, loaded) if computed else IDLE_S
        if loads_until > now + orders.load_within_s:
            # vLLM computes again what was to be loaded.
            loads_until = now + orders.load_within_s
            parts = [(asked, 0, 0) for asked, _, _ in parts]
        self.clock.now = max(now + seconds, loads_until)
        self._end_step(parts, orders)

    def _schedule(self) -> tuple[list[tuple[Asked, int, int]], list[Asked], int]:
        budget, parts, new, loaded = self._budget - len(self._decoders), [], [], 0
        for asked in self._running:
            end = min(asked.request.num_tokens, asked.request.computed + budget)
            parts.append((asked, asked.request.computed, end))
            budget -= end - asked.request.computed
        for asked in list(self._waiting):
            if budget <= 0:
                break
            hit = self.scheduler.num_new_matched_tokens(asked.request, 0)
            if hit is None:
                continue
            end = min(asked.request.num_tokens, hit + budget)
            asked.request.blocks = list(range(1, 1 + -(-asked.request.num_tokens // BLOCK)))
            self.scheduler.allocated(asked.request, [asked.request.blocks], hit)
            self._waiting.remove(asked)
            self._running.append(asked)
            new.append(asked)
            asked.cached = hit
            asked.request.computed = hit
            parts.append((asked, hit, end))
            budget, loaded = budget - (end - hit), loaded + hit
        return parts, new, loaded

    def _output(self, parts: Sequence[tuple[Asked, int, int]], new: Sequence[Asked]) -> Any:
        cached = [(asked.request, first) for asked, first, _ in parts if asked not in new]
        cached += [(request, request.computed) for request in self._decoders]
        finished, self._finished = self._finished, set()
        counts = {asked.request.request_id: end - first for asked, first, end in parts}
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=asked.request.request_id,
                    num_computed_tokens=asked.cached,
                    block_ids=(list(asked.request.blocks),),
                )
                for asked in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[request.request_id for request, _ in cached],
                num_computed_tokens=[first for _, first in cached],
                new_block_ids=[None for _ in cached],
                resumed_req_ids=set(),
            ),
            num_scheduled_tokens=counts | {request.request_id: 1 for request in self._decoders},
            finished_req_ids=finished,
        )

    def _end_step(self, parts: Sequence[tuple[Asked, int, int]], orders: StepOrders) -> None:
        now, reports = self.clock.now, []
        for worker in self.workers:
            worker.pass_until(now)
            reports.append(worker.report(orders.step, now))
        self.scheduler.learn(StepReports(tuple(reports)))
        self.scheduler.result_came()
        for asked, _, end in parts:
            asked.request.computed = end
            if end == asked.request.num_tokens:
                asked.ttft_s = now - asked.came
                self._running.remove(asked)
                self._finish(asked.request)

    def _decode(self) -> None:
        self._number += 1
        request = ScriptedRequest(f"d{self._number}", [self._number] * 100, 1 << 30)
        request.computed = 100
        self.scheduler.arrived(request)
        self._decoders.append(request)

    def _finish(self, request: ScriptedRequest) -> None:
        self.scheduler.finished(request, request.blocks)
        self._finished.add(request.request_id)
