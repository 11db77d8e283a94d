"""Which request computes, loads and stores what in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lwkv.errors import ConfigError, RequestError
from lwkv.reference.blocks import BlockAllocator
from lwkv.reference.request import Prompt, RunningRequest
from lwkv.request import Request

# How many tokens of a prompt's prefix the cache holds, given the tokens and the salts.
Lookup = Callable[[Sequence[int], Sequence[str]], int]


@dataclass(frozen=True, slots=True)
class StepShare:
    """One request's share of a step: it computes tokens `start` to `end`.

    `load` asks for KV up to `start`, of tokens that are not in the engine; `store` offers what the step
    completes. Either may be None.
    """

    state: RunningRequest
    start: int
    end: int
    load: Request | None
    store: Request | None


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a step: `step_tokens` computed in it and `max_requests` at once.

    Whole chunks of `chunk_size` tokens are offered for storing as they fill up, and the rest of the prompt
    with its last token; generated tokens only with `store_decode`.

    Raises ConfigError for a number under 1.
    """

    step_tokens: int = 512
    max_requests: int = 8
    chunk_size: int = 256
    store_decode: bool = False

    def __post_init__(self) -> None:
        for name in ("step_tokens", "max_requests", "chunk_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


class Scheduler:
    """First come, first served, prompts in parts. A request starts when its whole length has free blocks.

    With `blends`, those with segments are started by `start_blends` and computed at once.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        limits: Limits,
        lookup: Lookup | None,
        blends: bool = False,
    ) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._limits = limits
        self._lookup = lookup
        self._blends = blends
        self._waiting: deque[RunningRequest] = deque()
        self._running: list[RunningRequest] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, state: RunningRequest) -> None:
        """Queue a request. Raises RequestError for one that could never run."""
        prompt = state.prompt
        if len(prompt.tokens) < 1 or prompt.max_new_tokens < 1:
            raise RequestError(
                f"a request needs a token and room for one: got {len(prompt.tokens)} tokens, "
                f"max_new_tokens {prompt.max_new_tokens}"
            )
        if self._num_blocks(prompt) > self._allocator.num_blocks:
            raise RequestError(
                f"{len(prompt.tokens)} + {prompt.max_new_tokens} tokens need {self._num_blocks(prompt)} "
                f"blocks, the cache has {self._allocator.num_blocks}: ask for less or make it larger"
            )
        room = min(len(prompt.tokens) - 1, len(prompt.local_blocks) * self._block_size)
        if not 0 <= prompt.num_local <= room:
            raise RequestError(
                f"num_local is {prompt.num_local}; this prompt and its local_blocks allow 0 to {room}"
            )
        self._waiting.append(state)

    def plan(self) -> list[StepShare]:
        """Share out the next step; one token at least of every request in it is computed."""
        budget = self._limits.step_tokens
        works = []
        for state in self._running[:budget]:
            works.append(self._work(state, budget, hit=0))
            budget -= works[-1].end - works[-1].start
            if budget == 0:
                return works
        while budget > 0 and self._can_start() and not self._is_to_blend():
            state = self._waiting.popleft()
            works.append(self._work(state, budget, hit=self._start(state)))
            budget -= works[-1].end - works[-1].start
        return works

    def start_blends(self) -> list[RunningRequest]:
        """Start the requests at the head of the queue that are to be blended; all of each is computed."""
        states = []
        while self._can_start() and self._is_to_blend():
            state = self._waiting.popleft()
            self._take_blocks(state)
            state.is_blended = True
            states.append(state)
        return states

    def complete(self, work: StepShare, num_present: int, stored: bool) -> bool:
        """Note the end of a step; False if a load failed.

        `num_present` is the number of leading tokens whose KV was there; `stored` is about the step's stores.
        """
        state = work.state
        state.num_steps += 1
        state.num_prefilled += max(0, min(work.end, state.num_prompt) - work.start)
        if num_present < work.start:
            state.num_failed_loads += 1
            state.num_offered = self._whole_chunks(num_present)
        elif work.store is not None and stored:
            state.num_offered = len(work.store.tokens)
        if work.load is not None:
            state.num_loaded = min(num_present, work.start) - state.prompt.num_local
        state.num_computed = work.end if num_present >= work.start else num_present
        return num_present >= work.start

    def finish(self, state: RunningRequest) -> None:
        """Drop a request; its blocks are free again unless it keeps them."""
        self._running.remove(state)
        if not state.prompt.keep_blocks:
            self._allocator.free(state.blocks)

    def _can_start(self) -> bool:
        if not self._waiting or len(self._running) >= self._limits.max_requests:
            return False
        prompt = self._waiting[0].prompt
        return self._num_blocks(prompt) - len(prompt.local_blocks) <= self._allocator.num_free

    def _start(self, state: RunningRequest) -> int:
        """Give the request its blocks; returns how many of its tokens the cache holds."""
        self._take_blocks(state)
        prompt = state.prompt
        return self._lookup(prompt.tokens, prompt.salts) if self._lookup is not None else 0

    def _is_to_blend(self) -> bool:
        return self._blends and len(self._waiting[0].prompt.segments) > 0

    def _take_blocks(self, state: RunningRequest) -> None:
        prompt = state.prompt
        missing = max(0, self._num_blocks(prompt) - len(prompt.local_blocks))
        state.blocks = [*prompt.local_blocks, *self._allocator.take(missing)]
        state.num_computed = prompt.num_local
        self._running.append(state)

    def _work(self, state: RunningRequest, budget: int, hit: int) -> StepShare:
        # A fully cached prompt leaves its last token to compute: its logits are what is sampled.
        start = max(state.num_computed, min(hit, len(state.tokens) - 1))
        end = min(len(state.tokens), start + budget)
        load = None
        if start > state.num_computed:
            load = self._load(state, start, hit)
            state.num_offered = hit
        return StepShare(state, start, end, load, self._store(state, end))

    def _load(self, state: RunningRequest, start: int, hit: int) -> Request:
        slots = state.slots(hit, self._block_size)
        slots[start:] = -1
        return Request(
            torch.tensor(state.tokens[:hit]),
            slots,
            torch.arange(hit) >= state.num_computed,
            state.prompt.salts,
        )

    def _store(self, state: RunningRequest, end: int) -> Request | None:
        if state.is_blended:
            return None  # its KV is no ordinary prefill's
        limit = end if self._limits.store_decode else min(end, state.num_prompt)
        offer = limit if limit == state.num_prompt else self._whole_chunks(limit)
        if offer <= state.num_offered:
            return None
        mask = torch.arange(offer) >= self._whole_chunks(state.num_offered)
        slots = state.slots(offer, self._block_size)
        return Request(torch.tensor(state.tokens[:offer]), slots, mask, state.prompt.salts)

    def _whole_chunks(self, num_tokens: int) -> int:
        return num_tokens // self._limits.chunk_size * self._limits.chunk_size

    def _num_blocks(self, prompt: Prompt) -> int:
        return -(-(len(prompt.tokens) + prompt.max_new_tokens) // self._block_size)
