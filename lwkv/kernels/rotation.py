"""Turning keys in plain torch: see `Turn`."""

from __future__ import annotations

import torch
from torch import Tensor

from lwkv.kernels.protocol import Turn
from lwkv.layouts.paged_layer import PagedLayer


def check_rotatable(layer: PagedLayer) -> None:
    """Raise ValueError unless the layer's bytes are known to be floats."""
    if not layer.dtype.is_floating_point:
        raise ValueError(f"layer {layer.name!r} is {layer.dtype}: only float caches can be rotated")


def rotate(k: Tensor, turn: Turn) -> None:
    """Turn k, float (T, H, D), in place."""
    half = turn.cos.shape[1]
    first = k[..., 0 : 2 * half : 2] if turn.interleaved else k[..., :half]
    second = k[..., 1 : 2 * half : 2] if turn.interleaved else k[..., half : 2 * half]
    math = torch.float64 if k.dtype == torch.float64 else torch.float32
    c, s = (table[turn.angle_of][:, None].to(math) for table in (turn.cos, turn.sin))
    a, b = first.to(math), second.to(math)
    turned = a * c - b * s, b * c + a * s
    first.copy_(_fit(turned[0], k.dtype))
    second.copy_(_fit(turned[1], k.dtype))


def _fit(x: Tensor, dtype: torch.dtype) -> Tensor:
    # torch's cast makes NaN or infinity of what fp8 cannot hold; device kernels saturate.
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit) if dtype.itemsize == 1 else x
