"""Decoding requests and arriving prompts, on an engine without SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from lwkv.benchmarks.sglang.load import DECODED_TOKENS, Load, Question, Server

LOAD = Load(decoders=2, seconds=0.2, every_s=0.05, prefix=64, suffix=4, num_prefixes=3)


class Engine:
    """As much of `sglang.Engine` as is used; a stream goes on until it is aborted, or has all its tokens."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.aborted: set[str] = set()
        self.tokenizer_manager = self

    def abort_request(self, rid: str) -> None:
        self.aborted.add(rid)

    async def async_generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], stream: bool = False, rid: str = ""
    ) -> Any:
        if stream:
            return self._stream(sampling_params["max_new_tokens"], rid)
        seen = tuple(input_ids[:64]) in {tokens[:64] for tokens in self.asked}
        self.asked.append(tuple(input_ids))
        return {"output_ids": [7], "meta_info": {"cached_tokens_details": {"host": 64} if seen else None}}

    async def _stream(self, most: int, rid: str) -> AsyncIterator[dict[str, Any]]:
        for count in range(1, most + 1):
            if rid in self.aborted:
                return
            await asyncio.sleep(0.001)
            yield {"meta_info": {"completion_tokens": count}}


def test_prompts_arrive_while_requests_decode_and_all_of_them_end() -> None:
    engine = Engine()
    served = asyncio.run(Server(engine, LOAD, 1000).serve())
    assert served.from_host == [64] * 4
    assert served.first_tokens == [7] * 4
    assert len(served.ttft_ms) == 4
    assert served.decoded == len(served.gaps_ms) > 0
    assert engine.aborted == {"decoder-0", "decoder-1"}
    assert len(engine.asked) == 3 + 4


def test_every_prompt_is_new_behind_a_prefix_that_was_computed() -> None:
    assert {question.prefix_seed for question in LOAD.prepared()} == {800, 801, 802}
    tokens = [tuple(question.tokens(1000)) for question in (*LOAD.prepared(), *LOAD.arriving())]
    assert len(set(tokens)) == 7
    assert len({prompt[:64] for prompt in tokens}) == 3
    assert Question(2, 1, 0, 0).tokens(10) == Question(2, 1, 0, 5).tokens(10)
    assert DECODED_TOKENS > 64
