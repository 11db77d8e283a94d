"""Requests that decode in SGLang all the time, and prompts with cached prefixes that arrive beside them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DECODED_PROMPT, DECODED_TOKENS = 128, 2048
"""Of a request that decodes. When it ends the next one begins: SGLang keeps room for all of its tokens."""
SETTLED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Question:
    """Two parts of random tokens, each from its seed; before it the cache may be flushed."""

    prefix: int
    prefix_seed: int
    suffix: int
    suffix_seed: int
    flush: bool = False

    def tokens(self, vocabulary: int) -> list[int]:
        """Prefix and suffix, as many ids as they are long."""
        parts = ((self.prefix_seed, self.prefix), (self.suffix_seed, self.suffix))
        drawn = [np.random.default_rng(seed).integers(3, vocabulary, length) for seed, length in parts]
        return [int(token) for token in np.concatenate(drawn)]


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine is to serve.

    Attributes:
        decoders: requests that decode all the time.
        seconds: how long prompts arrive.
        every_s: seconds between two of them.
        prefix, suffix: tokens of a prompt that were computed before, and new ones.
        num_prefixes: that are visited in turn; computed first, one by one. More than the device holds.
    """

    decoders: int
    seconds: float
    every_s: float
    prefix: int
    suffix: int
    num_prefixes: int

    def prepared(self) -> list[Question]:
        return [self._question(seed, 0) for seed in range(self.num_prefixes)]

    def arriving(self) -> list[Question]:
        """The prompts that arrive; the first prefix was computed longest ago."""
        count = round(self.seconds / self.every_s)
        return [self._question(number % self.num_prefixes, 1 + number) for number in range(count)]

    def _question(self, seed: int, suffix_seed: int) -> Question:
        return Question(self.prefix, 800 + seed, self.suffix, 20_000 + suffix_seed)


@dataclass(slots=True)
class Served:
    """What it took: milliseconds until the first token of prompts that arrived, and between two decoded ones.

    Attributes:
        from_host: tokens of each prompt that came from host memory, as SGLang counts.
        decoded: tokens in `seconds`.
    """

    ttft_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    from_host: list[int] = field(default_factory=list)
    first_tokens: list[int] = field(default_factory=list)
    decoded: int = 0
    seconds: float = 0.0


class Server:
    """Serves one load on an `sglang.Engine`, in the event loop of that."""

    def __init__(self, engine: Any, load: Load, vocabulary: int) -> None:
        self._engine, self._load, self._vocabulary = engine, load, vocabulary
        self._served = Served()
        self._counts = [0] * load.decoders
        self._is_measured = self._is_over = False

    async def serve(self) -> Served:
        load, served = self._load, self._served
        for question in load.prepared():
            await self._first_token(question)
        decoders = [asyncio.create_task(self._decode(number)) for number in range(load.decoders)]
        while min(self._counts, default=SETTLED_TOKENS) < SETTLED_TOKENS:
            await asyncio.sleep(0.01)
        begin = time.perf_counter()
        self._is_measured = True
        await asyncio.gather(*(self._arrive(*item, begin) for item in enumerate(load.arriving())))
        served.seconds = time.perf_counter() - begin
        self._is_measured, self._is_over = False, True
        for number in range(load.decoders):
            self._engine.tokenizer_manager.abort_request(rid=_name(number))
        await asyncio.gather(*decoders)
        return served

    async def _arrive(self, number: int, question: Question, begin: float) -> None:
        due = begin + number * self._load.every_s
        await asyncio.sleep(due - time.perf_counter())
        output = await self._first_token(question)
        details = output["meta_info"].get("cached_tokens_details") or {}
        self._served.ttft_ms.append(1e3 * (time.perf_counter() - due))
        self._served.from_host.append(details.get("host", 0))
        self._served.first_tokens.append(int(output["output_ids"][0]))

    async def _first_token(self, question: Question) -> Any:
        ids = question.tokens(self._vocabulary)
        return await self._engine.async_generate(input_ids=ids, sampling_params=_greedy(1))

    async def _decode(self, number: int) -> None:
        prompt = Question(DECODED_PROMPT, 50 + number, 0, 0).tokens(self._vocabulary)
        while not self._is_over:
            stream = await self._engine.async_generate(
                input_ids=prompt, sampling_params=_greedy(DECODED_TOKENS), stream=True, rid=_name(number)
            )
            last: tuple[int, float] | None = None
            async for output in stream:
                now, count = time.perf_counter(), int(output["meta_info"]["completion_tokens"])
                if last is not None and self._is_measured:
                    self._served.gaps_ms.append(1e3 * (now - last[1]))
                    self._served.decoded += count - last[0]
                last = count, now
                self._counts[number] = max(count, self._counts[number])


def _greedy(max_tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def _name(number: int) -> str:
    return f"decoder-{number}"
