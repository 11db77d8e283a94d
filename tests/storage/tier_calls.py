"""Chunks that tell by their bytes which they are, put into a tier and got from it as the guard does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from storage.faulty_tier import LONG_S
from storage.rig import NUM_LAYERS, PAGE_BYTES

from lwkv.keys import ChunkKey, LayerKey
from lwkv.storage import Status, Tier


def layer_keys(chunk: ChunkKey, layers: Sequence[int]) -> list[LayerKey]:
    return [LayerKey(chunk, layer) for layer in layers]


def page_of(layer_key: LayerKey, num_bytes: int) -> torch.Tensor:
    """Bytes that tell the namespace, the chunk and the layer."""
    seed = int.from_bytes(layer_key.chunk.hash, "little") * NUM_LAYERS + layer_key.layer
    seed += 1000 * len(layer_key.chunk.namespace)
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=random)


def put(tier: Tier, chunk: ChunkKey, layers: Sequence[int], num_bytes: int = PAGE_BYTES) -> list[Status]:
    asked = layer_keys(chunk, layers)
    return tier.put(asked, [page_of(each, num_bytes) for each in asked], LONG_S)


def store(tier: Tier, *chunks: ChunkKey, num_bytes: int = PAGE_BYTES) -> None:
    """Put whole chunks as the guard does: layer 0 last."""
    for chunk in chunks:
        for layers in (range(1, NUM_LAYERS), range(1)):
            assert put(tier, chunk, layers, num_bytes) == [Status.OK] * len(layers)


def load(tier: Tier, asked: Sequence[LayerKey], num_bytes: int = PAGE_BYTES) -> list[Status]:
    """Get pages; those that are OK must be what was put."""
    pages = [torch.full((num_bytes,), 255, dtype=torch.uint8) for _ in asked]
    statuses = tier.get(asked, pages, LONG_S)
    for each, page, status in zip(asked, pages, statuses, strict=True):
        assert status is not Status.OK or torch.equal(page, page_of(each, num_bytes))
    return statuses
