"""Long random runs over a tiny memory that two engines share."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from engine.rig import CHUNK, LAYERS, prompt
from engine.test_long_run import run_step
from oracle import Dims, Oracle, require_rest
from shared_host.owners import owner_at

from lwkv.platforms import Platform


@pytest.mark.parametrize("seed", range(2))
def test_every_byte_is_right_while_two_engines_store_and_load_the_same_prompts(
    platform: Platform, device: torch.device, tmp_path: Path, seed: int
) -> None:
    path, dims = tmp_path / "host.sock", Dims(blocks=48)
    oracles = [Oracle(platform, device, dims=dims) for _ in range(2)]
    oracles[1]._numbers = oracles[0]._numbers  # the same tokens are computed to the same rows
    rng = np.random.default_rng(seed)
    prompts = [prompt(0, 16 * (i % 2)) + prompt(i + 1, int(rng.integers(1, 40))) for i in range(8)]
    settings = {"host_memory": str(path), "staging_bytes": 8 * oracles[0].page_bytes(CHUNK)}
    with owner_at(path, LAYERS * 9), ExitStack() as ending:
        engines = [ending.enter_context(oracle.engine(CHUNK, **settings)) for oracle in oracles]
        for _ in range(150):
            picked = rng.choice(len(prompts), rng.integers(1, 4), replace=False)
            turn = int(rng.integers(2))
            assert engines[1 - turn].flush(), "what it holds would count as this one's"
            run_step(oracles[turn], engines[turn], rng, [prompts[i] for i in picked])
        assert [engine.flush() for engine in engines] == [True, True]
        for engine in engines:
            require_rest(engine)
            assert engine.stats()["tokens_retrieved"] > 200
            assert engine.stats()["chunks_evicted"] > 30
            assert "load_failures" not in engine.stats()
