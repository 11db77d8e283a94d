"""A transformer of a given shape in plain torch, to have something to overlap with."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from lwkv.benchmarks.measuring.shapes import Shape

NUM_WEIGHT_SETS = 4


class Stack:
    """Layers of GEMMs and attention, eager, over `num_cached + num_new` keys; random weights.

    The weights of NUM_WEIGHT_SETS layers are used in turn: they are far larger than any cache.
    """

    def __init__(self, shape: Shape, num_cached: int, num_new: int, device: torch.device) -> None:
        self.shape = shape

        def random(*size: int) -> torch.Tensor:
            drawn = torch.randn(size, dtype=shape.dtype, device=device)
            return drawn.mul_(size[-1] ** -0.5)

        hidden, heads, kv_heads, size = shape.hidden, shape.num_heads, shape.num_kv_heads, shape.head_size
        self._weights = [
            (
                random((heads + 2 * kv_heads) * size, hidden),
                random(hidden, heads * size),
                random(2 * shape.intermediate, hidden),
                random(hidden, shape.intermediate),
            )
            for _ in range(NUM_WEIGHT_SETS)
        ]
        self._k = random(1, kv_heads, num_cached + num_new, size)
        self._v = random(1, kv_heads, num_cached + num_new, size)
        self._norm = torch.ones(hidden, dtype=shape.dtype, device=device)
        self.input = random(num_new, hidden)

    def project(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Queries of a layer, (1, num_new, heads, head_size), of x, (num_new, hidden)."""
        shape, (qkv, _, _, _) = self.shape, self._weights[layer % NUM_WEIGHT_SETS]
        heads = F.rms_norm(x, (shape.hidden,), self._norm) @ qkv.T
        q = heads[:, : shape.num_heads * shape.head_size]
        return q.view(1, len(x), shape.num_heads, shape.head_size)

    def attend(self, layer: int, x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """x with the attention of its queries added."""
        _, out, _, _ = self._weights[layer % NUM_WEIGHT_SETS]
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), self._k, self._v, enable_gqa=True)
        return x + mixed.transpose(1, 2).reshape(len(x), -1) @ out.T

    def mix(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The MLP half of a layer."""
        _, _, up, down = self._weights[layer % NUM_WEIGHT_SETS]
        gate, value = (F.rms_norm(x, (self.shape.hidden,), self._norm) @ up.T).chunk(2, -1)
        return x + (F.silu(gate) * value) @ down.T
