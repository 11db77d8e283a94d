"""The KV caches and models that are measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lwkv.kinds import Kind


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's KV cache and, for the overlap, its layers. Sizes in elements and tokens.

    Of `full_every` layers one keeps all tokens, the others a window. Parts that do not measure kinds have all
    layers keep all tokens, as engines with one group of caches do.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    num_heads: int
    hidden: int
    intermediate: int
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    chunk_size: int = 256
    use_mla: bool = False
    window: int = 0
    full_every: int = 1

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token in one layer."""
        return (1 if self.use_mla else 2) * self.num_kv_heads * self.head_size * self.dtype.itemsize

    def kv_bytes(self, num_tokens: int) -> int:
        """KV bytes of `num_tokens` tokens in all layers."""
        return num_tokens * self.num_layers * self.token_bytes

    def kinds(self) -> list[Kind]:
        """Its kinds of caches: with windows, where there are any, and full attention."""
        full = self.num_layers // self.full_every
        dtype = str(self.dtype).removeprefix("torch.")
        block = self.block_size, self.block_size * self.token_bytes
        kinds = [Kind("full", block[0], full, block[1], (dtype,))]
        if full == self.num_layers:
            return kinds
        return [Kind("window", block[0], self.num_layers - full, block[1], (dtype,), self.window), *kinds]


LLAMA_8B = Shape("llama-8b", 32, 8, 128, 32, 4096, 14336)
DEEPSEEK_V3 = Shape("deepseek-v3", 61, 1, 576, 128, 7168, 18432, use_mla=True)
DEEPSEEK_V2_LITE = Shape("deepseek-v2-lite", 27, 1, 576, 16, 2048, 10944, use_mla=True)
GEMMA_3_12B = Shape("gemma-3-12b", 48, 8, 256, 16, 3840, 15360, window=1024, full_every=6)
# Of 32 experts four are used, with 2880 rows each.
GPT_OSS_20B = Shape("gpt-oss-20b", 24, 8, 64, 64, 2880, 4 * 2880, window=128, full_every=2)
TINY = Shape("tiny", 8, 2, 64, 2, 128, 256, dtype=torch.float32, chunk_size=64)
SHAPES = {
    shape.name: shape for shape in (LLAMA_8B, DEEPSEEK_V3, DEEPSEEK_V2_LITE, GEMMA_3_12B, GPT_OSS_20B, TINY)
}


def mla_of(shape: Shape) -> Shape:
    """The shape with one row a token and layer that is measured beside `shape`."""
    if shape.use_mla:
        return shape
    return DEEPSEEK_V3 if shape is LLAMA_8B else replace(shape, num_kv_heads=1, use_mla=True)
