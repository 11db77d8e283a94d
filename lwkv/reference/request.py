"""What is asked of the reference engine, and what it answers."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: token ids and how to go on from them, greedily.

    Generation ends with a token of `stop_tokens`, which is part of the answer, or after `max_new_tokens`.
    `salts` keep its KV apart from that of equal tokens (an adapter's name, a tenant). With `num_local` the
    first tokens' KV is in `local_blocks` already, which then belong to the request. `keep_blocks` hands the
    blocks over with the answer instead of freeing them. `segments` are the parts, first token and end, that
    an engine with a blender reuses wherever they stand.
    """

    tokens: Sequence[int]
    max_new_tokens: int = 16
    stop_tokens: Collection[int] = ()
    salts: Sequence[str] = ()
    num_local: int = 0
    local_blocks: Sequence[int] = ()
    keep_blocks: bool = False
    segments: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished request. Times count from its submission; `first_token_s` is the time to first token.

    Of `num_prompt` tokens, `num_local` were in the engine, `num_loaded` came from the cache and
    `num_computed` were computed, those of a failed load again. `blocks` is empty unless they were kept.
    """

    tokens: list[int]
    num_prompt: int
    num_local: int
    num_loaded: int
    num_computed: int
    num_failed_loads: int
    num_steps: int
    first_token_s: float
    total_s: float
    blocks: list[int]


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request on its way: `num_computed` tokens have KV in `blocks`, the cache got `num_offered`."""

    index: int
    prompt: Prompt
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_offered: int = 0
    num_loaded: int = 0
    num_prefilled: int = 0
    num_failed_loads: int = 0
    num_steps: int = 0
    is_blended: bool = False
    submitted_s: float = field(default_factory=time.perf_counter)
    first_token_s: float = 0.0

    @property
    def num_prompt(self) -> int:
        return len(self.prompt.tokens)

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_finished(self) -> bool:
        stopped = self.num_new > 0 and self.tokens[-1] in self.prompt.stop_tokens
        return stopped or self.num_new >= self.prompt.max_new_tokens

    def slots(self, count: int, block_size: int) -> Tensor:
        """Give the slots of the first `count` tokens: int64 (count,), CPU."""
        return block_slots(self.blocks, count, block_size)

    def add(self, token: int) -> None:
        """Append a sampled token."""
        if self.num_new == 0:
            self.first_token_s = time.perf_counter() - self.submitted_s
        self.tokens.append(token)

    def answer(self) -> Answer:
        """Sum up a finished request."""
        return Answer(
            tokens=self.tokens[self.num_prompt :],
            num_prompt=self.num_prompt,
            num_local=self.prompt.num_local,
            num_loaded=self.num_loaded,
            num_computed=self.num_prefilled,
            num_failed_loads=self.num_failed_loads,
            num_steps=self.num_steps,
            first_token_s=self.first_token_s,
            total_s=time.perf_counter() - self.submitted_s,
            blocks=list(self.blocks) if self.prompt.keep_blocks else [],
        )


def block_slots(blocks: Sequence[int], count: int, block_size: int) -> Tensor:
    """Give the slots of `count` tokens that fill `blocks` in order: int64 (count,), CPU."""
    positions = torch.arange(count)
    return torch.tensor(blocks)[positions // block_size] * block_size + positions % block_size
