"""As much of documents is reused as a cache of the same room keeps of them."""

from __future__ import annotations

import random
from pathlib import Path

from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import BLOCK, CHUNK, assert_same, prompt, started
from integrations.in_vllm.test_blending import Documents, ask, blending, count, settle
from integrations.in_vllm.test_soak import RAW, PrefixOracle

CHUNK_GIB = RAW.chunk_gib
ROOM = 24
"""Chunks of host memory: the documents have 20, and prompts that find none of theirs have six or seven."""
LENGTH = 2 * CHUNK
PROMPTS = 40


def reusable(one: Documents, found: list[int]) -> int:
    """The tokens of documents up to the last block that one of them fills, with so many found of each."""
    ends = [start + tokens for (start, _), tokens in zip(one.segments, found, strict=True)]
    last = max((end for end, tokens in zip(ends, found, strict=True) if tokens), default=0)
    last -= last % BLOCK
    return sum(max(min(end, last) - start, 0) for (start, _), end in zip(one.segments, ends, strict=True))


def test_what_is_reused_is_what_a_cache_of_the_same_room_has(llama: Path, plain: Elsewhere) -> None:
    drawn, oracle = random.Random(4), PrefixOracle(ROOM, CHUNK)
    documents = [prompt(400 + number, LENGTH) for number in range(10)]
    extra = {"slab_bytes": int(ROOM * CHUNK_GIB * 2**30) // 4}
    settings = blending(blend_recompute_ratios=1.0, max_local_cpu_size=ROOM * CHUNK_GIB, extra_config=extra)
    wanted = 0
    with started(llama, enable_prefix_caching=True, max_num_batched_tokens=1024, **settings) as engine:
        for turn in range(PROMPTS):
            # Some are asked for more often than others; no two prompts begin with the same.
            parts = sorted(documents, key=lambda part: drawn.random() * (1 + documents.index(part)))[:3]
            one = Documents(parts, prompt(500 + turn, 20), prompt(600 + turn, 30))
            found = [oracle.ask(part) for part in parts]
            wanted += reusable(one, found)
            if not any(found):
                oracle.ask(one.ids)  # computed and stored as a whole
            assert_same(ask(engine, [one], 1), plain.ask([one.ids], 1))
            settle(engine)
        engine.at_rest()
        reused = count(engine, "tokens_reused")
    print(f"\n{reused} tokens of documents reused, {wanted} by an oracle with the same room")
    assert reused >= 0.95 * wanted > 0
