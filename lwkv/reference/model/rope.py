"""Rotary position embedding, half-split form: element i of a head turns with element i + rotary_size / 2."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lwkv.reference.model.shape import ModelShape, RopeScaling


def inverse_frequencies(shape: ModelShape) -> Tensor:
    """Give the radians per position of each pair, after scaling: float64, (rotary_size / 2,), CPU."""
    exponents = torch.arange(0, shape.rotary_size, 2, dtype=torch.float64) / shape.rotary_size
    plain = shape.rope_base**-exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    kept = _llama3_kept(plain, scaling) if scaling.kind == "llama3" else _yarn_kept(shape, scaling)
    return plain * kept + plain / scaling.factor * (1 - kept)


def magnitude(shape: ModelShape) -> float:
    """Give the factor on rotated q and k: 1 but for YaRN (Peng et al. 2023, section 3.4)."""
    scaling = shape.rope_scaling
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0


def _llama3_kept(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Weigh the unscaled frequency by how often it turns within the original context (Llama 3.1)."""
    turns = scaling.original_positions * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return ((turns - low) / (high - low)).clamp(0, 1)


def _yarn_kept(shape: ModelShape, scaling: RopeScaling) -> Tensor:
    """Weigh the unscaled frequency by a ramp over pairs, as YaRN's published checkpoints were trained."""

    def pair_turning(turns: float) -> float:
        ratio = scaling.original_positions / (turns * 2 * math.pi)
        return shape.rotary_size * math.log(ratio) / (2 * math.log(shape.rope_base))

    first, last = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, shape.rotary_size - 1)
    pairs = torch.arange(shape.rotary_size // 2, dtype=torch.float64)
    return 1 - ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)


class RopeTable:
    """The cosines and sines of every position asked for so far, on one device."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(shape)
        self._magnitude = magnitude(shape)
        self._device = device
        self._cos = self._sin = torch.empty(0, self._frequencies.numel(), device=device)

    def rows(self, positions: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """Look up the device's int64 (T,), all under `num_positions`: two of float32 (T, rotary_size / 2)."""
        if num_positions > len(self._cos):
            self._grow(max(num_positions, 2 * len(self._cos), 1024))
        return self._cos[positions], self._sin[positions]

    def _grow(self, num_positions: int) -> None:
        # In float64, as float32 angles are off by 1e-2 at position 100,000; on the CPU, as some devices
        # have no float64.
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), self._frequencies)
        self._cos = (angles.cos() * self._magnitude).float().to(self._device)
        self._sin = (angles.sin() * self._magnitude).float().to(self._device)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads, (T, H, D) of any float dtype, by float32 cos and sin (T, R / 2); the rest past R stays."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat((*turned, rest), dim=-1).to(heads.dtype)
