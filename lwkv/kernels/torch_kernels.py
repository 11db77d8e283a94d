"""The kernels in plain torch indexing: for every device, and the reference for the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lwkv.kernels.protocol import Rows, Sharing
from lwkv.kernels.rotation import check_rotatable, rotate
from lwkv.paged_layer import PagedLayer


class TorchKernels:
    """`Kernels` for any device. Torch raises for rows out of range, but takes a negative one from the end.

    In inference mode: caches allocated there, as engines do, can be written nowhere else.
    """

    name = "torch"
    takes_handles = False

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

    def introduce(self, layers: Sequence[PagedLayer]) -> None:
        pass

    def move_layers(self, scatter: bool, sharing: Sharing, handle: int | None = None) -> None:
        move = self.scatter if scatter else self.gather
        for layer, staging in sharing.parts():
            move(layer, staging, sharing.rows)

    @torch.inference_mode()
    def scatter_rotated(
        self, layer: PagedLayer, staging: Tensor, rows: Rows, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> None:
        check_rotatable(layer)
        place = _place(layer, rows)
        (cache, staged, numbers), *rest = _parts(layer, staging, rows)
        k = staged.index_select(0, numbers)
        rotate(k.view(layer.dtype), cos, sin, interleaved)
        cache[place] = k
        for cache, staged, numbers in rest:
            cache[place] = staged.index_select(0, numbers)


def _place(layer: PagedLayer, rows: Rows) -> tuple[Tensor, Tensor]:
    return rows.slots // layer.block_size, rows.slots % layer.block_size


def _parts(layer: PagedLayer, staging: Tensor, rows: Rows) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(paged view, staging as [rows, heads, width], staging row numbers) of K and, where there is one, V."""
    k, v = layer.words
    whole_rows = staging.numel() // layer.row_bytes * layer.row_bytes
    staged = staging[:whole_rows].view(k.dtype).view(-1, *k.shape[2:])
    return [(k, staged, rows.k_rows), *([] if v is None else [(v, staged, rows.v_rows)])]
