"""The engine's paged KV cache: one tensor a layer, in a layout that vLLM uses or has used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lwkv.errors import ConfigError
from lwkv.reference.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How B blocks of N slots with H heads of D elements lie in one tensor.

    `dims` gives the tensor's shape from (B, N, H, D); `split` gives its views of K and V, each (B, N, H, D).
    """

    dims: Callable[[int, int, int, int], tuple[int, ...]]
    split: Callable[[Tensor], tuple[Tensor, Tensor]]


def _split_width(cache: Tensor) -> tuple[Tensor, Tensor]:
    k, v = cache.transpose(1, 2).chunk(2, dim=-1)
    return k, v


LAYOUTS = {
    "vllm_bhn2d": CacheLayout(lambda b, n, h, d: (b, h, n, 2 * d), _split_width),
    "vllm_2bnhd": CacheLayout(lambda b, n, h, d: (2, b, n, h, d), lambda cache: (cache[0], cache[1])),
    "vllm_b2nhd": CacheLayout(lambda b, n, h, d: (b, 2, n, h, d), lambda cache: (cache[:, 0], cache[:, 1])),
}


class PagedCache:
    """Blocks of KV for all layers of one model, on one device.

    `tensors` maps vLLM's layer names to the tensors an engine would register, in the layers' order; they
    start as zeros and live as long as the cache.

    Raises ConfigError for a layout that is not in `LAYOUTS` and for sizes under 1.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        num_blocks: int,
        block_size: int = 16,
        layout: str = "vllm_bhn2d",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if layout not in LAYOUTS:
            raise ConfigError(f"no cache layout {layout!r}; there are {', '.join(LAYOUTS)}")
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(f"num_blocks {num_blocks} and block_size {block_size} must be at least 1")
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        dims = LAYOUTS[layout].dims(num_blocks, block_size, shape.num_kv_heads, shape.head_size)
        self.tensors = {
            f"model.layers.{layer}.self_attn.attn": torch.zeros(dims, dtype=dtype, device=device)
            for layer in range(shape.num_layers)
        }
        self._views = [LAYOUTS[layout].split(cache) for cache in self.tensors.values()]

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k and v, (T, num_kv_heads, head_size), into slots given as int64 (T,) blocks and offsets."""
        k_cache, v_cache = self._views[layer]
        k_cache[blocks, offsets] = k
        v_cache[blocks, offsets] = v

    def read(self, layer: int, blocks: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Copy out k and v, (num_tokens, num_kv_heads, head_size), of a request's blocks, int64 (blocks,)."""
        k_cache, v_cache = self._views[layer]
        return k_cache[blocks].flatten(0, 1)[:num_tokens], v_cache[blocks].flatten(0, 1)[:num_tokens]

    def fill(self, value: float) -> None:
        """Overwrite every slot, so that a read of something never written is seen."""
        for cache in self.tensors.values():
            cache.fill_(value)
