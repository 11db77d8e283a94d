"""A bench small enough for tests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.shapes import TINY, Shape
from lwkv.benchmarks.throttled import part as throttled
from lwkv.benchmarks.transfers import host
from lwkv.platforms import Platform


@pytest.fixture
def shape() -> Shape:
    return replace(
        TINY, num_layers=3, head_size=8, hidden=16, intermediate=8, block_size=4, chunk_size=8, name="test"
    )


@pytest.fixture
def bench(platform: Platform, device: torch.device, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(host, "CHUNKS", (1, 3))
    monkeypatch.setattr(host, "HASHED_TOKENS", 64)
    monkeypatch.setattr(throttled, "COMPUTE_MS", 0.1)
    monkeypatch.setattr(throttled, "NUM_LAYERS", 3)
    return Bench(platform, device, shape, prefix=64, suffixes=(3, 5), repeats=1)
