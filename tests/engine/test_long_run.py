"""A long random run over a tiny pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from engine.rig import CHUNK, LAYERS, prompt
from oracle import Dims, Oracle, require_rest

from lwkv.engine import CacheEngine, Request
from lwkv.platforms import Platform


def test_a_long_random_run_over_a_tiny_pool_keeps_every_byte_right(
    platform: Platform, device: torch.device
) -> None:
    oracle = Oracle(platform, device, dims=Dims(blocks=48))
    rng = np.random.default_rng(7)
    prompts = [prompt(0, 16 * (i % 2)) + prompt(i + 1, int(rng.integers(1, 40))) for i in range(8)]
    with oracle.engine(CHUNK, pages=LAYERS * 7, staging_bytes=8 * oracle.page_bytes(CHUNK)) as engine:
        for _ in range(300 if device.type == "cpu" else 100):
            picked = rng.choice(len(prompts), rng.integers(1, 4), replace=False)
            run_step(oracle, engine, rng, [prompts[i] for i in picked])
        require_rest(engine)
        stats = engine.stats()
        assert stats["chunks_evicted"] > 50
        assert stats["tokens_retrieved"] > 500
        assert "load_failures" not in stats


def run_step(
    oracle: Oracle, engine: CacheEngine, rng: np.random.Generator, prompts: Sequence[list[int]]
) -> None:
    """Retrieve what is cached, compute the rest, store; the blocks were dealt out at random."""
    dims = oracle.dims
    blocks = rng.permutation(dims.blocks)
    requests = []
    for tokens in prompts:
        needed = -(-len(tokens) // dims.block_size)
        own, blocks = blocks[:needed], blocks[needed:]
        slots = (own[:, None] * dims.block_size + np.arange(dims.block_size)).ravel()[: len(tokens)]
        local = int(rng.integers(0, len(tokens) + 1)) if rng.random() < 0.4 else 0
        oracle.compute(tokens[:local], slots[:local])
        requests.append(Request(tokens, slots, np.arange(len(tokens)) >= local))
    promised, *_, masks = engine.retrieve_batch(requests, sync=bool(rng.integers(2)))
    for request, mask, count in zip(requests, masks, promised, strict=True):
        assert int(mask.sum()) == count
        oracle.expect(request.tokens, request.slot_mapping, mask)
        rest = request.mask & ~mask.numpy()
        oracle.compute(request.tokens, np.where(rest, request.slot_mapping, -1))
    oracle.check()
    whole = [Request(request.tokens, request.slot_mapping) for request in requests]
    steps = engine.store_batch(whole)
    for _ in range(int(rng.integers(1, LAYERS + 3)) if rng.random() < 0.2 else LAYERS + 1):
        next(steps, None)
    steps.close()
    if rng.random() < 0.5:
        require_rest(engine)
