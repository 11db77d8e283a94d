"""What the scheduler's half of the connector costs vLLM's scheduler a step; needs neither vLLM nor a device.

`python -m lwkv.benchmarks.vllm_scheduler` prints microseconds as JSON: medians, and the longest step.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

from lwkv.config.settings import Config
from lwkv.integrations.vllm.orders import StepOrders
from lwkv.integrations.vllm.reports import RankInfo, RankReport, StepReports
from lwkv.integrations.vllm.scheduler.lookup.index import ChunkIndex
from lwkv.integrations.vllm.scheduler.side import Role, SchedulerSide

CHUNK = 256
BLOCK = 16
INFO = RankInfo(0, "model")


@dataclass(eq=False)
class Request:
    """As much of vLLM's request as the connector looks at."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    computed: int = 0
    prompt_token_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class Decoding:
    """Requests that have been prefilled and decode, a token a step.

    Args:
        num_drafts: draft tokens of a request in each step.
    """

    def __init__(
        self, num_requests: int, num_tokens: int, save_decode_cache: bool, num_drafts: int = 0
    ) -> None:
        config = Config(chunk_size=CHUNK, save_decode_cache=save_decode_cache)
        self.index = ChunkIndex(1, CHUNK)
        self.index.introduce(INFO)
        self.scheduler = SchedulerSide(
            config, Role(True, True), self.index, BLOCK, most_decoded=1 + num_drafts
        )
        self._drafts = num_drafts
        self._blocks = 1
        self.requests = [self._request(number, num_tokens) for number in range(num_requests)]
        self.scheduler.orders(self._prefill())
        for request in self.requests:
            self._append(request, request.num_tokens, 1)

    def step(self, accepted: int = 0) -> StepOrders:
        """The orders of a step in which every request decodes, with so many of its drafts accepted."""
        return self.timed_step(accepted)[0]

    def timed_step(self, accepted: int = 0) -> tuple[StepOrders, float]:
        """A step's orders, and the seconds that they took."""
        output = self._decode()
        start = time.perf_counter()
        orders = self.scheduler.orders(output)
        seconds = time.perf_counter() - start
        for request in self.requests:
            self._append(request, 1 + accepted, 1 + accepted)
        return orders, seconds

    def _append(self, request: Request, computed: int, sampled: int) -> None:
        request.computed += computed
        request.all_token_ids += [0] * sampled

    def _request(self, number: int, num_tokens: int) -> Request:
        draw = random.Random(number)
        ids = [draw.randrange(100_000) for _ in range(num_tokens)]
        request = Request(f"request-{number}", ids, num_tokens, prompt_token_ids=list(ids))
        self.scheduler.num_new_matched_tokens(request, 0)
        self.scheduler.allocated(request, [[]], 0)
        return request

    def _prefill(self) -> Any:
        new = [
            SimpleNamespace(
                req_id=request.request_id,
                num_computed_tokens=0,
                block_ids=(self._take_blocks(-(-request.num_tokens // BLOCK)),),
            )
            for request in self.requests
        ]
        scheduled = {request.request_id: request.num_tokens for request in self.requests}
        return _output(new, [], [], [], scheduled)

    def _decode(self) -> Any:
        ids = [request.request_id for request in self.requests]
        computed = [request.computed for request in self.requests]
        blocks = [
            (self._take_blocks(1),) if request.computed % BLOCK == 0 else None for request in self.requests
        ]
        return _output([], ids, computed, blocks, dict.fromkeys(ids, 1 + self._drafts))

    def _take_blocks(self, number: int) -> list[int]:
        self._blocks += number
        return list(range(self._blocks - number, self._blocks))


def _output(
    new: Sequence[Any], ids: Sequence[str], computed: Sequence[int], blocks: Sequence[Any], scheduled: Any
) -> Any:
    """As vLLM's scheduler output."""
    cached = SimpleNamespace(
        req_ids=ids, num_computed_tokens=computed, new_block_ids=blocks, resumed_req_ids=set()
    )
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=scheduled,
        finished_req_ids=set(),
    )


def idle_us(num_requests: int, num_tokens: int, num_steps: int) -> dict[str, float]:
    """Steps in which every request decodes and none has anything to store."""
    decoding = Decoding(num_requests, num_tokens, False)
    return _summary([decoding.timed_step()[1] for _ in range(num_steps)])


def crossing_us(num_requests: int, num_tokens: int) -> dict[str, float]:
    """Steps in which a chunk of every request is full, with `save_decode_cache`."""
    decoding = Decoding(num_requests, num_tokens // CHUNK * CHUNK, True)
    steps = [decoding.timed_step() for _ in range(2 * CHUNK)]
    return _summary([seconds for orders, seconds in steps if orders.stores])


def waiting_us(num_tokens: int, num_steps: int) -> dict[str, float]:
    """Lookups of a request that waits, while others' chunks come and go."""
    decoding = Decoding(1, num_tokens, False)
    request = Request("waits", list(range(num_tokens)), num_tokens, prompt_token_ids=[0])
    look_up = partial(decoding.scheduler.num_new_matched_tokens, request, 0)
    look_up()
    taken = []
    for number in range(num_steps):
        report = RankReport(INFO, number, kept=[number.to_bytes(16, "big")])
        decoding.scheduler.learn(StepReports((report,)))
        start = time.perf_counter()
        look_up()
        taken.append(time.perf_counter() - start)
    return _summary(taken)


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": round(median(seconds) * 1e6, 1), "longest": round(max(seconds) * 1e6, 1)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lwkv.benchmarks.vllm_scheduler",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[256, 1024], help="numbers of requests that run at once"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=200, help="scheduler steps that are measured")
    options = parser.parse_args(arguments)
    figures = {
        str(number): {
            "idle_us": idle_us(number, options.tokens, options.steps),
            "all_cross_a_chunk_us": crossing_us(number, options.tokens),
        }
        for number in options.requests
    }
    waiting = waiting_us(options.tokens, options.steps)
    json.dump({"tokens": options.tokens, "requests": figures, "waiting_us": waiting}, sys.stdout, indent=2)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
