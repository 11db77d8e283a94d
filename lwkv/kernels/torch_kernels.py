"""The kernels in plain torch indexing: for every device, and the reference for the others."""

from __future__ import annotations

import torch
from torch import Tensor

from lwkv.kernels.protocol import Rows
from lwkv.paged_layer import PagedLayer


class TorchKernels:
    """`Kernels` for any device. Torch raises for rows out of range, but takes a negative one from the end.

    In inference mode: caches allocated there, as engines do, can be written nowhere else.
    """

    name = "torch"

    @torch.inference_mode()
    def scatter(self, layer: PagedLayer, staging: Tensor, rows: Rows) -> None:
        place = _place(layer, rows)
        for cache, staged, numbers in _parts(layer, staging, rows):
            cache[place] = staged.index_select(0, numbers)

    @torch.inference_mode()
    def gather(self, layer: PagedLayer, staging: Tensor, rows: Rows) -> None:
        place = _place(layer, rows)
        for cache, staged, numbers in _parts(layer, staging, rows):
            staged[numbers] = cache[place]

    @torch.inference_mode()
    def scatter_rotated(
        self, layer: PagedLayer, staging: Tensor, rows: Rows, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> None:
        check_rotatable(layer)
        place = _place(layer, rows)
        (cache, staged, numbers), *rest = _parts(layer, staging, rows)
        k = staged.index_select(0, numbers)
        _rotate(k.view(layer.dtype), cos, sin, interleaved)
        cache[place] = k
        for cache, staged, numbers in rest:
            cache[place] = staged.index_select(0, numbers)


def check_rotatable(layer: PagedLayer) -> None:
    """Raise ValueError unless the layer's bytes are known to be floats."""
    if not layer.dtype.is_floating_point:
        raise ValueError(f"layer {layer.name!r} is {layer.dtype}: only float caches can be rotated")


def _place(layer: PagedLayer, rows: Rows) -> tuple[Tensor, Tensor]:
    return rows.slots // layer.block_size, rows.slots % layer.block_size


def _parts(layer: PagedLayer, staging: Tensor, rows: Rows) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(paged view, staging as [rows, heads, width], staging row numbers) of K and, where there is one, V."""
    k, v = layer.words
    whole_rows = staging.numel() // layer.row_bytes * layer.row_bytes
    staged = staging[:whole_rows].view(k.dtype).view(-1, *k.shape[2:])
    return [(k, staged, rows.k_rows), *([] if v is None else [(v, staged, rows.v_rows)])]


def _rotate(k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Turn k, float (T, H, D), in place; tables as in `Kernels.scatter_rotated`."""
    half = cos.shape[1]
    first = k[..., 0 : 2 * half : 2] if interleaved else k[..., :half]
    second = k[..., 1 : 2 * half : 2] if interleaved else k[..., half : 2 * half]
    math = torch.float64 if k.dtype == torch.float64 else torch.float32
    a, b, c, s = first.to(math), second.to(math), cos[:, None].to(math), sin[:, None].to(math)
    turned = a * c - b * s, b * c + a * s
    first.copy_(_fit(turned[0], k.dtype))
    second.copy_(_fit(turned[1], k.dtype))


def _fit(x: Tensor, dtype: torch.dtype) -> Tensor:
    # torch's cast makes NaN or infinity of what fp8 cannot hold; device kernels saturate.
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit) if dtype.itemsize == 1 else x
