"""What the engine has, what is cached and where chunks end: what is promised is loaded, and no more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from oracle import Dims, Oracle, require_rest

from lwkv.engine import CacheEngine
from lwkv.platforms import Platform


@dataclass(frozen=True)
class Scale:
    """Sizes of a sweep; `locals` and `lengths` are what is in the engine, and what was stored."""

    chunk: int
    block: int
    locals: tuple[int, ...]
    lengths: tuple[int, ...]


SMALL = Scale(16, 4, tuple(range(33)), (*range(18), 20, 31, 32, 33, 37, 47, 48))
REAL = Scale(256, 16, (0, 1, 16, 255, 256, 257, 300, 512), (0, 255, 256, 257, 511, 512, 600))
ends = pytest.mark.parametrize("partial", [False, True], ids=["full chunks", "partial chunks too"])


@pytest.mark.parametrize("scale", [SMALL, REAL], ids=["scaled down", "as vLLM has it"])
@ends
def test_loads_cover_what_is_cached_beyond_the_local_prefix_and_no_other_slot(
    platform: Platform, device: torch.device, scale: Scale, partial: bool
) -> None:
    longest = max(scale.lengths) + 5
    blocks = 2 * -(-longest // scale.block)
    oracle = Oracle(platform, device, dims=Dims(2, blocks, scale.block, 1, 3))
    rng = np.random.default_rng(scale.chunk + partial)
    with oracle.engine(scale.chunk, pages=512, save_unfull_chunk=partial) as engine:
        for length in scale.lengths:
            tokens = [10_000 * length + i for i in range(longest)]
            slots = oracle_slots(oracle, rng, longest)
            oracle.compute(tokens[:length], slots[:length])
            engine.store(tokens[:length], slot_mapping=slots[:length])
            assert engine.flush()
            for prompt in (tokens[:length], tokens[: length + 5]):
                sweep_local(oracle, engine, scale, prompt, length, rng)
        require_rest(engine)


def sweep_local(
    oracle: Oracle,
    engine: CacheEngine,
    scale: Scale,
    prompt: list[int],
    length: int,
    rng: np.random.Generator,
) -> None:
    """Retrieve a prompt of which `length` tokens were stored, behind every local prefix."""
    whole = length - length % scale.chunk
    cached = length if engine.config.save_unfull_chunk and len(prompt) == length else whole
    assert engine.lookup(prompt) == cached
    for local in scale.locals:
        if local <= len(prompt):
            slots = oracle_slots(oracle, rng, len(prompt))
            places = np.arange(len(prompt))
            promised, *_, mask = engine.retrieve_layer(prompt, places >= local, slot_mapping=slots)
            assert promised == max(0, cached - local)
            assert mask.tolist() == ((places >= local) & (places < cached)).tolist()
            oracle.expect(prompt, slots, mask)
    oracle.check()


def oracle_slots(oracle: Oracle, rng: np.random.Generator, count: int) -> np.ndarray:
    """Slots in whole blocks, dealt out at random as an engine does."""
    size = oracle.dims.block_size
    blocks = rng.permutation(oracle.dims.blocks)[: -(-count // size)]
    return (blocks[:, None] * size + np.arange(size)).ravel()[:count]


@ends
def test_stores_leave_out_chunks_wholly_inside_the_masked_part(
    platform: Platform, device: torch.device, partial: bool
) -> None:
    oracle = Oracle(platform, device, dims=Dims(2, 20, 4, 1, 3))
    chunk = 16
    for length in (0, 5, 16, 20, 32, 41):
        tokens, slots = list(range(100, 100 + length)), np.arange(length)
        for masked in range(length + 1):
            oracle.compute(tokens, slots)
            with oracle.engine(chunk, save_unfull_chunk=partial) as engine:
                engine.store(tokens, slots >= masked, slot_mapping=slots)
                require_rest(engine)
                ends = [*range(chunk, length + 1, chunk), *([length] if partial and length % chunk else [])]
                assert engine.stats()["chunks"] == sum(end > masked for end in ends)
    oracle.check()
