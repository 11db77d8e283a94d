"""What was stored for other layers or in another dtype is never loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracle import MemoryTier

from lwkv.config.settings import Config
from lwkv.engine import CacheEngine
from lwkv.errors import ConfigError
from lwkv.metadata import CacheMetadata
from lwkv.platforms import Platform

HALF, BRAIN, QUARTER = torch.float16, torch.bfloat16, torch.float8_e4m3fn
TOKENS = list(range(8))


class Rank:
    """One rank of a pipeline, its layers given by name and dtype."""

    def __init__(self, platform: Platform, device: torch.device) -> None:
        self.platform, self.device = platform, device
        self.tier = MemoryTier()

    @contextmanager
    def engine(self, layers: Any, kv_dtype: torch.dtype | None = None, **ranks: int) -> Iterator[CacheEngine]:
        metadata = CacheMetadata("toy", 2, 2, 4, HALF, kv_dtype, **ranks)
        config = Config(chunk_size=8, max_local_cpu_size=0.01)
        engine = CacheEngine.create(
            config, metadata, self.caches(layers), "vllm", {"block_size": 4}, self.platform, [self.tier]
        )
        with engine:
            yield engine

    def caches(self, layers: Any) -> Any:
        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(2, 8, 4, 2, 4, dtype=dtype, device=self.device)

        if isinstance(layers, Sequence):
            return [zeros(dtype) for dtype in layers]
        return {name: zeros(dtype) for name, dtype in layers.items()}


@pytest.fixture
def rank(platform: Platform, device: torch.device) -> Rank:
    return Rank(platform, device)


STORED = {"model.10": HALF, "model.11": HALF}
OTHERS: dict[str, Any] = {
    "the pipeline cut elsewhere": {"model.11": HALF, "model.12": HALF},
    "the layers in another order": {"model.11": HALF, "model.10": HALF},
    "another dtype in the first layer": {"model.10": BRAIN, "model.11": HALF},
    "another dtype in the last layer": {"model.10": HALF, "model.11": BRAIN},
    "layers without names": [HALF, HALF],
}


@pytest.mark.parametrize("layers", OTHERS.values(), ids=OTHERS)
def test_other_layers_are_a_miss(rank: Rank, layers: Any) -> None:
    with rank.engine(STORED) as engine:
        engine.store(TOKENS, slot_mapping=TOKENS)
    with rank.engine(layers) as engine:
        assert engine.lookup(TOKENS) == 0
        assert not engine.retrieve(TOKENS, slot_mapping=TOKENS).any()
    with rank.engine(STORED) as engine:
        assert engine.retrieve(TOKENS, slot_mapping=TOKENS).all()


def test_layers_without_names_are_told_apart_by_the_rank(rank: Rank) -> None:
    with rank.engine([HALF, HALF], pp_size=2) as engine:
        engine.store(TOKENS, slot_mapping=TOKENS)
    for pipeline in ({"pp_size": 2, "pp_rank": 1}, {"pp_size": 3}):
        with rank.engine([HALF, HALF], **pipeline) as engine:
            assert engine.lookup(TOKENS) == 0
    with rank.engine({"layer_0": HALF, "layer_1": HALF}, pp_size=2) as engine:
        assert engine.lookup(TOKENS) == 8


def test_bytes_are_kept_apart_by_what_they_are(rank: Rank) -> None:
    layers = {"l.0": torch.uint8, "l.1": HALF}
    with rank.engine(layers, kv_dtype=QUARTER) as engine:
        engine.store(TOKENS, slot_mapping=TOKENS)
    with rank.engine(layers, kv_dtype=torch.float8_e5m2) as engine:
        assert engine.lookup(TOKENS) == 0


@pytest.mark.parametrize(
    ("layers", "kv_dtype"),
    [({"a": BRAIN, "b": BRAIN}, HALF), ({"a": HALF, "b": torch.uint8}, None), ([torch.int8], None)],
)
def test_a_dtype_that_does_not_fit_the_caches_is_refused(rank: Rank, layers: Any, kv_dtype: Any) -> None:
    with pytest.raises(ConfigError, match="kv_dtype"), rank.engine(layers, kv_dtype):
        pass
