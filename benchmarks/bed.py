"""A cache engine on paged caches of a given shape, with tokens to move."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from lwkv.benchmarks.shapes import Shape
from lwkv.config import Config
from lwkv.engine import CacheEngine
from lwkv.metadata import CacheMetadata
from lwkv.platforms import Platform

Slots = npt.NDArray[np.int64]


class Bed:
    """Caches of `shape` for `num_tokens` tokens in two places, random blocks both, and the engine on them.

    `source` and `target` are int64 (num_tokens,), the slots of the two places.
    """

    def __init__(
        self,
        platform: Platform,
        device: torch.device,
        shape: Shape,
        num_tokens: int,
        layout: str = "vllm_bhn2d",
        extra: Mapping[str, object] | None = None,
        spare_tokens: int = 0,
    ) -> None:
        self.platform, self.device, self.shape, self.num_tokens = platform, device, shape, num_tokens
        per_place = -(-(num_tokens + spare_tokens) // shape.block_size)
        self.caches = [_new_cache(shape, 2 * per_place, layout, device) for _ in range(shape.num_layers)]
        blocks = np.random.default_rng(0).permutation(2 * per_place)
        self.source = _slots(blocks[:per_place], shape.block_size)
        self.target = _slots(blocks[per_place:], shape.block_size)
        gib = shape.kv_bytes(num_tokens) / 2**30
        config = Config(
            chunk_size=shape.chunk_size,
            use_layerwise=True,
            max_local_cpu_size=2.5 * gib + 0.1,
            extra_config={"reserve_gib": 2.2 * gib + 0.05, **(extra or {})},
        )
        metadata = CacheMetadata(
            shape.name,
            shape.num_layers,
            shape.num_kv_heads,
            shape.head_size,
            shape.dtype,
            use_mla=shape.use_mla,
        )
        hints = {"block_size": shape.block_size, "layout": "vllm_mla" if shape.use_mla else layout}
        self.engine = CacheEngine.create(config, metadata, self.caches, layout_hints=hints, platform=platform)

    def prompt(self, number: int) -> Slots:
        """Token ids that no other number shares, int64 (num_tokens,)."""
        return np.arange(self.num_tokens, dtype=np.int64) + (number << 32)

    def fill(self) -> None:
        """Write random bytes to all caches."""
        for cache in self.caches:
            raw = cache if cache.is_contiguous() else torch.as_strided(cache, (cache.numel(),), (1,))
            raw.view(torch.uint8).random_(0, 256)

    def store(self, tokens: Slots) -> None:
        """Store the source slots as `tokens`, and wait until they can be looked up."""
        self.engine.store(tokens, slot_mapping=self.source[: len(tokens)])
        assert self.engine.flush(), "stores did not end"

    def rows(self, cache: torch.Tensor, slots: Slots) -> torch.Tensor:
        """The bytes of `slots`, gathered on the device, for a comparison."""
        layer = next(item for item in self.engine.connector.layers if item.k.data_ptr() == cache.data_ptr())
        index = torch.from_numpy(slots).to(self.device)
        place = index // self.shape.block_size, index % self.shape.block_size
        parts = [layer.k[place]] if layer.v is None else [layer.k[place], layer.v[place]]
        return torch.stack(parts)

    def places_agree(self) -> bool:
        """Whether the target slots hold what the source slots hold, byte for byte."""
        count = self.num_tokens - self.num_tokens % self.shape.chunk_size
        self.platform.synchronize_device(self.device)
        return all(
            torch.equal(self.rows(cache, self.source[:count]), self.rows(cache, self.target[:count]))
            for cache in self.caches
        )

    def close(self) -> None:
        """Give everything back."""
        self.engine.close()
        self.caches.clear()


def _new_cache(shape: Shape, num_blocks: int, layout: str, device: torch.device) -> torch.Tensor:
    block, heads, size = shape.block_size, shape.num_kv_heads, shape.head_size
    sizes = {
        "vllm_mla": (num_blocks, block, size),
        "vllm_2bnhd": (2, num_blocks, block, heads, size),
        "vllm_b2nhd": (num_blocks, 2, block, heads, size),
        # Token by token in memory, as vLLM keeps it on GPUs; head by head in the logical shape.
        "vllm_bhn2d": (num_blocks, block, heads, 2 * size),
    }
    name = "vllm_mla" if shape.use_mla else layout
    cache = torch.zeros(sizes[name], dtype=shape.dtype, device=device)
    return cache.transpose(1, 2) if name == "vllm_bhn2d" else cache


def _slots(blocks: Slots, block_size: int) -> Slots:
    return (blocks[:, None] * block_size + np.arange(block_size)).ravel()
