"""A planner on its own, for requests that are not vLLM's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

from lwkv.blend.segment_cache import segment_keys
from lwkv.integrations.vllm.blending.scheduler.plan import BlendSizes
from lwkv.integrations.vllm.blending.scheduler.planner import BlendPlanner
from lwkv.integrations.vllm.blending.scheduler.prompt_segments import PromptSegments
from lwkv.integrations.vllm.blending.scheduler.segment_tiers import SegmentTiers
from lwkv.integrations.vllm.reports import RankInfo, RankReport
from lwkv.integrations.vllm.scheduler.lookup.index import ChunkIndex
from lwkv.integrations.vllm.scheduler.lookup.look_ups import LookUps
from lwkv.integrations.vllm.scheduler.lookup.waiting_loads import WaitingLoads
from lwkv.keys import ChunkKey
from lwkv.telemetry.counters import Counters

T = TypeVar("T")

BLOCK, CHUNK = 4, 8
SIZES = BlendSizes(BLOCK, CHUNK, min_tokens=8, most_rows=1000, full_layers=0.5, share=0.2)
PREFIX = (7, 7, 7)
PROMPT = list(range(100, 160))
SEGMENTS = ((2, 18), (20, 41))
TIMEOUT_S = 10.0


@dataclass(eq=False)
class FakeRequest:
    """As much of vLLM's Request as is looked at."""

    request_id: str = "one"
    prompt_token_ids: list[int] = field(default_factory=lambda: list(PROMPT))
    segments: Sequence[tuple[int, int]] = SEGMENTS
    lora_request: Any = None

    def __post_init__(self) -> None:
        self.sampling_params = object()
        self.all_token_ids = list(self.prompt_token_ids)
        self.kv_transfer_params = {"lwkv_segments": [list(part) for part in self.segments]}
        ends = range(BLOCK, len(self.all_token_ids) + 1, BLOCK)
        self.block_hashes = [bytes(self.all_token_ids[:end]).ljust(64, b"-")[-32:] for end in ends]

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


class Shelf:
    """Tiers below host memory that have some chunks, by their hashes, and may not answer for a while."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self.asked: list[ChunkKey] = []
        self.answers = threading.Event()
        self.answers.set()

    def find(self, keys: Sequence[ChunkKey]) -> list[str | None]:
        assert self.answers.wait(20)
        self.asked += keys
        return ["disk" if key.hash in self.hashes else None for key in keys]

    def leave_alone(self, tiers: Mapping[str, float]) -> None: ...

    def follow(self, prompt: Sequence[ChunkKey]) -> None: ...

    def close(self) -> None: ...


class AtOnce(LookUps):
    """Every look-up has an answer when it begins."""

    def begin(self, look_up: Callable[[], T]) -> Future[T]:
        answer: Future[T] = Future()
        answer.set_result(look_up())
        return answer


class Bench:
    """A planner, and what is in the tiers of its ranks; its clock stands still."""

    def __init__(
        self,
        sizes: BlendSizes = SIZES,
        prefix: Sequence[int] = PREFIX,
        num_ranks: int = 1,
        most_chunks: int = 40,
        fetches: bool = True,
        look_ups: LookUps | None = None,
    ) -> None:
        self.prefix = prefix
        self.now = 0.0
        self.infos = [RankInfo(rank, f"model-{rank}", most_chunks=most_chunks) for rank in range(num_ranks)]
        self.shelves = [Shelf() for _ in self.infos]
        self.counters = Counters()
        self.index = ChunkIndex(num_ranks, CHUNK, False, lambda info: self.shelves[info.rank], self.clock)
        for info in self.infos:
            self.index.introduce(info)
        self.waiting = WaitingLoads(num_ranks, TIMEOUT_S, self.counters, self.clock)
        self.look_ups = look_ups or AtOnce()
        tiers = SegmentTiers(self.index, self.waiting, self.look_ups, CHUNK, prefix, fetches)
        find = PromptSegments(None)
        self.planner = BlendPlanner(sizes, find, prefix, tiers, self.counters, TIMEOUT_S, self.clock)

    def clock(self) -> float:
        return self.now

    def keys(self, request: FakeRequest, part: tuple[int, int], rank: int = 0) -> list[ChunkKey]:
        tokens = request.prompt_token_ids[slice(*part)]
        return segment_keys(tokens, CHUNK, self.infos[rank].namespace, self.prefix)

    def hashes(self, request: FakeRequest, part: tuple[int, int], rank: int = 0) -> list[bytes]:
        return [key.hash for key in self.keys(request, part, rank)]

    def report(self, rank: int = 0, **changes: Sequence[Any]) -> None:
        """Have a rank report what it has, and has not, and which fetches have ended."""
        report = RankReport(self.infos[rank], 1, **changes)
        self.index.learn(report)
        self.waiting.learn(report)

    def cache(self, request: FakeRequest, *parts: tuple[int, int]) -> None:
        """Have segments in the host memory of all ranks."""
        for part in parts:
            for rank in range(len(self.infos)):
                self.report(rank, kept=self.hashes(request, part, rank))

    def evict(self, request: FakeRequest, *parts: tuple[int, int], lower: bool = False) -> None:
        """Have segments out of host memory, and maybe in a lower tier."""
        for part in parts:
            for rank, shelf in enumerate(self.shelves):
                hashes = self.hashes(request, part, rank)
                self.report(rank, dropped=hashes)
                shelf.hashes.update(hashes if lower else ())

    def step(self, **scheduled: int) -> None:
        """A step that computes so many tokens of new requests."""
        new = [SimpleNamespace(req_id=name, num_computed_tokens=0) for name in scheduled]
        cached = SimpleNamespace(req_ids=[], num_computed_tokens=[])
        self.planner.begin_step(
            SimpleNamespace(
                num_scheduled_tokens=scheduled, scheduled_new_reqs=new, scheduled_cached_reqs=cached
            )
        )

    def follow(self, request: FakeRequest) -> FakeRequest:
        self.planner.follow(request, ())
        return request
