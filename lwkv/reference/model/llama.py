"""A Llama-family transformer, cut where a serving engine cuts it: before and after attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lwkv.reference.model.rope import RopeTable, rotate
from lwkv.reference.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: matrices are (out, in), the rows of qkv are q, k, v and those of gate_up gate, up."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of one model, of one dtype and on one device; `head` is `embedding` where they are tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


class Model:
    """The layers of a decoder-only model. Holds no state of a request and never waits for the device."""

    def __init__(self, shape: ModelShape, weights: ModelWeights) -> None:
        self.shape = shape
        self.weights = weights
        self.rope = RopeTable(shape, self.device)

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """Turn token ids, int64 (T,), into hidden states (T, hidden_size)."""
        return self.weights.embedding[tokens]

    def project(self, layer: int, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make rotated q (T, num_heads, head_size), rotated k and plain v (T, num_kv_heads, head_size)."""
        weights, shape = self.weights.layers[layer], self.shape
        normed = self._norm(hidden, weights.attention_norm)
        qkv = functional.linear(normed, weights.qkv, weights.qkv_bias).view(len(hidden), -1, shape.head_size)
        qk, v = qkv.tensor_split([shape.num_heads + shape.num_kv_heads], dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = qk.tensor_split([shape.num_heads], dim=1)
            qk = torch.cat((self._norm(q, weights.q_norm), self._norm(k, weights.k_norm)), dim=1)
        q, k = rotate(qk, cos, sin).tensor_split([shape.num_heads], dim=1)
        return q, k, v

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """Add the attention output, (T, num_heads, head_size), and the MLP to hidden (T, hidden_size)."""
        weights = self.weights.layers[layer]
        hidden = hidden + functional.linear(attended.flatten(1), weights.output)
        gate, up = functional.linear(self._norm(hidden, weights.mlp_norm), weights.gate_up).chunk(2, dim=-1)
        return hidden + functional.linear(functional.silu(gate) * up, weights.down)

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn the last layer's hidden states (T, hidden_size) into float32 logits (T, vocab_size)."""
        return functional.linear(self._norm(hidden, self.weights.norm), self.weights.head).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.shape.norm_eps)
        return (wide * scale).to(x.dtype) * weight
