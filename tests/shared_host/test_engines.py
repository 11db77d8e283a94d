"""Engines that share an owner's memory: what one stores the others find, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.rig import CHUNK, prompt, require_closed, store
from oracle import Dims, Oracle, run_slots
from shared_host.owners import LONG_S, OwnerThread, owner_at

from lwkv.engine import CacheEngine
from lwkv.platforms import Platform

DIMS = Dims()
PAGES = 64
LENGTH = 3 * CHUNK


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "host.sock"


@pytest.fixture
def owner(path: Path) -> Iterator[OwnerThread]:
    with owner_at(path, PAGES) as owner:
        yield owner


@pytest.fixture
def oracle(platform: Platform, device: torch.device) -> Oracle:
    return Oracle(platform, device, dims=DIMS)


def engine_at(oracle: Oracle, path: Path, timeout_s: float = LONG_S, **settings: Any) -> CacheEngine:
    return oracle.engine(CHUNK, host_memory=str(path), host_timeout_s=timeout_s, **settings)


def load(oracle: Oracle, engine: CacheEngine, tokens: list[int]) -> int:
    """How many tokens were loaded; their bytes are right."""
    slots = run_slots(16, len(tokens))
    loaded = int(engine.retrieve(tokens, slot_mapping=slots).sum())
    oracle.expect(tokens[:loaded], slots[:loaded])
    oracle.check()
    oracle.zero(slots)
    return loaded


def test_what_one_engine_stores_is_a_hit_of_another(oracle: Oracle, owner: OwnerThread, path: Path) -> None:
    with engine_at(oracle, path) as one, engine_at(oracle, path) as other:
        store(oracle, one, prompt(1, LENGTH), run_slots(0, LENGTH))
        assert other.lookup(prompt(1, LENGTH)) == LENGTH
        assert load(oracle, other, prompt(1, LENGTH)) == LENGTH
        assert other.stats()["host_used_bytes"] == 9 * 4096
        require_closed(one)
        require_closed(other)
