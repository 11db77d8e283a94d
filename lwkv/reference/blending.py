"""The reference model as blending drives it, and a blender on its paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lwkv.connectors.rope import Rope
from lwkv.reference.model.llama import Model
from lwkv.reference.model.rope import inverse_frequencies
from lwkv.reference.model.shape import ModelShape


def model_rope(shape: ModelShape) -> Rope:
    """How a model of this shape turns its keys: half-split, with the frequencies after scaling."""
    return Rope(tuple(inverse_frequencies(shape).tolist()))


class ReferenceBlend:
    """Implements `lwkv.blend.BlendModel`."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.rope = model_rope(model.shape)
        self.num_layers = model.shape.num_layers
        self.embed, self.finish, self.logits = model.embed, model.finish, model.logits

    @property
    def device(self) -> torch.device:
        return self._model.device

    def angles(self, positions: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        return self._model.rope.rows(positions, num_positions)

    def project(self, layer: int, hidden: Tensor, angles: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self._model.project(layer, hidden, *angles)
