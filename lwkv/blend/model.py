"""What blending asks of a model: its layers, cut before and after attention."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from lwkv.connectors.rope import Rope


class BlendModel(Protocol):
    """A decoder-only model whose layers can be run for any rows of a prompt.

    All work goes to the current stream of `device`. Attention is plain softmax of q k / sqrt(head_size).
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def rope(self) -> Rope:
        """How keys are turned, exactly: stored keys are moved to other positions by it."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Turn token ids, int64 (T,), into hidden states (T, hidden)."""

    def angles(self, positions: Tensor, num_positions: int) -> Any:
        """What `project` needs to know of rows at `positions`, int64 (T,), all below `num_positions`."""

    def project(self, layer: int, hidden: Tensor, angles: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Make turned q (T, num_heads, head_size), turned k and plain v (T, num_kv_heads, head_size)."""

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """Add attention's output, (T, num_heads, head_size), and the MLP to hidden."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn the last layer's hidden states (T, hidden) into float32 logits (T, vocab)."""
