"""A tiny model with a paged cache, a cache engine and a blender around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from dense_model import DenseBlend
from oracle import MemoryTier
from small_llama import small_shape
from torch import Tensor

from lwkv.blend import Blended, Blender, BlendRequest, Selector
from lwkv.config.settings import Config
from lwkv.engine import CacheEngine
from lwkv.platforms import Platform
from lwkv.reference import ModelShape, PagedCache, open_cache_engine, random_model
from lwkv.reference.blending import ReferenceBlend
from lwkv.reference.model.random_model import RandomTensors

CHUNK = 8
SEED = 3
SHARED = (90, 91, 92)


def some_tokens(count: int, first: int) -> list[int]:
    return [(first * 7 + 5 * i * i + 3 * i) % 89 for i in range(count)]


DOCUMENTS = [some_tokens(count, 10 * number) for number, count in enumerate((13, 8, 21))]
HEAD, GAP, QUESTION = [95, 96], [97], [1, 2, 3, 5, 8]


class Bench:
    """One model, its caches, and what it must give."""

    def __init__(
        self,
        shape: ModelShape,
        device: torch.device,
        layout: str = "vllm_bhn2d",
        tiers: Sequence[Any] = (),
        platform: Platform | None = None,
        **settings: Any,
    ) -> None:
        self.shape = shape
        self.model = random_model(shape, seed=SEED, device=device)
        self.cache = PagedCache(shape, num_blocks=60, block_size=5, layout=layout, device=device)
        self.cache.fill(float("nan"))
        config = Config(
            **{
                "use_layerwise": True,
                "enable_blending": True,
                "chunk_size": CHUNK,
                "max_local_cpu_size": 0.01,
                "blend_min_tokens": 0,
                **settings,
            }
        )
        self.engine: CacheEngine = open_cache_engine(
            config, self.model, self.cache, "tiny", tiers=tiers, platform=platform
        )
        self.dense = DenseBlend(shape, RandomTensors(shape, seed=SEED, scale=2.0, device=device))
        self.dense.tensors = {name: tensor.cpu() for name, tensor in self.dense.tensors.items()}

    def blender(
        self, selector: Selector | None = None, share: float | None = None, **options: Any
    ) -> Blender:
        options.setdefault("shared_prefix", SHARED)
        return Blender(self.engine, ReferenceBlend(self.model), selector=selector, share=share, **options)

    def encode(self, blender: Blender, documents: Sequence[Sequence[int]] = DOCUMENTS) -> None:
        for document in documents:
            num = len(blender.segments.shared_prefix) + len(document)
            blender.encode(document, np.arange(num)[::-1])
        assert self.engine.flush()
        self.cache.fill(float("nan"))

    def alone(self, blender: Blender, document: Sequence[int]) -> Any:
        shared = blender.segments.shared_prefix
        return self.dense.alone([*shared, *document], len(shared))

    def full(self, tokens: Sequence[int]) -> Tensor:
        return self.dense.logits(list(tokens))[-1].float()

    def close(self) -> None:
        assert self.engine.flush()
        stats = self.engine.stats()
        assert (stats["pins"], stats["writes_in_flight"]) == (0, 0)
        assert stats["page_references"] == stats["pages_in_use"]
        self.engine.close()


def prompt(
    order: Sequence[int], seed: int = 1, head: Sequence[int] = HEAD, **options: Any
) -> tuple[list[int], BlendRequest]:
    """The documents in this order, a gap behind each, and the question; its tokens, and the request."""
    tokens, segments = list(head), []
    for number in order:
        segments.append((len(tokens), len(tokens) + len(DOCUMENTS[number])))
        tokens += [*DOCUMENTS[number], *GAP]
    tokens += QUESTION
    slots = np.random.default_rng(seed).permutation(300)[: len(tokens)]
    return tokens, BlendRequest(tokens, slots, segments, **options)


def with_documents_in(tier: MemoryTier, shape: ModelShape, device: torch.device, **options: Any) -> Bench:
    """A bench whose documents are in the tier alone; another one has stored them there."""
    first = Bench(shape, device, tiers=[tier], **options)
    first.encode(first.blender())
    first.close()
    tier.closed = False
    return Bench(shape, device, tiers=[tier], **options)


def host(blended: Sequence[Blended]) -> list[Tensor]:
    return [one.logits.cpu() for one in blended]


@pytest.fixture
def shape() -> ModelShape:
    return small_shape(4)


@pytest.fixture
def bench(shape: ModelShape, device: torch.device) -> Iterator[Bench]:
    made = Bench(shape, device)
    yield made
    made.close()
