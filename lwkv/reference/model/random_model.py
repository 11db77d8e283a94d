"""Models with random weights whose output still depends on all of their KV cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lwkv.reference.model.llama import Model
from lwkv.reference.model.shape import ModelShape
from lwkv.reference.model.weights import EMBEDDING, assemble, tensor_dims


class RandomTensors:
    """Tensors of one shape, drawn anew at each read: the same for the same seed, name and device type."""

    def __init__(
        self, shape: ModelShape, *, seed: int, scale: float, device: torch.device | str = "cpu"
    ) -> None:
        self._dims = tensor_dims(shape)
        self._seeds = {name: (seed << 20) + number for number, name in enumerate(self._dims)}
        self._scale = scale
        self._device = device

    def names(self) -> set[str]:
        return set(self._dims)

    def read(self, name: str) -> Tensor:
        dims = self._dims[name]
        generator = torch.Generator(self._device).manual_seed(self._seeds[name])
        drawn = torch.randn(dims, generator=generator, device=self._device)
        if name.endswith("norm.weight"):
            return 1 + 0.1 * drawn
        if len(dims) == 1:
            return 0.1 * drawn
        return drawn * self._deviation(name, dims)

    def _deviation(self, name: str, dims: tuple[int, ...]) -> float:
        # Scores q.k / sqrt(d) then have a deviation of scale squared: attention picks few tokens instead of
        # averaging over all, and what it picks is as large as the residual.
        if name == EMBEDDING:
            return 1.0
        picks = "q_proj" in name or "k_proj" in name
        return (self._scale if picks else 1.0) / math.sqrt(dims[1])


def random_model(
    shape: ModelShape,
    *,
    seed: int = 0,
    scale: float = 2.0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Model:
    """Make a model whose weights are drawn on `device`; `scale` is how sharply its attention picks."""
    tensors = RandomTensors(shape, seed=seed, scale=scale, device=device)
    return assemble(shape, tensors, device=device, dtype=dtype)
