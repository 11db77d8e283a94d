"""The kernels in plain torch indexing: for every device, and the reference for the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from lwkv.kernels.protocol import Rows, StagedLayers, Turn
from lwkv.kernels.rotation import check_rotatable, rotate
from lwkv.layouts.paged_layer import PagedLayer

# A paged view and where in it the rows are; staging as [rows, heads, width] and where in it they are.
Part: TypeAlias = "tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]"


class TorchKernels:
    """`Kernels` for any device. Torch raises for rows out of range, but takes a negative one from the end.

    In inference mode: caches allocated there, as engines do, can be written nowhere else.
    """

    name = "torch"
    takes_handles = False

    @torch.inference_mode()
    def scatter(self, layer: PagedLayer, staging: Tensor, rows: Rows, turn: Turn | None = None) -> None:
        if turn is not None:
            check_rotatable(layer)
        for part, (cache, place, staged, numbers) in enumerate(_parts(layer, staging, rows)):
            words = staged.index_select(0, numbers)
            if turn is not None and part == 0:
                rotate(words.view(layer.dtype), turn)
            cache[place] = words

    @torch.inference_mode()
    def gather(self, layer: PagedLayer, staging: Tensor, rows: Rows) -> None:
        for cache, place, staged, numbers in _parts(layer, staging, rows):
            staged[numbers] = cache[place]

    def prepare(self, layers: Sequence[PagedLayer]) -> None:
        pass

    def move_layers(self, scatter: bool, sharing: StagedLayers, handle: int | None = None) -> None:
        for layer, staging in sharing.parts():
            if scatter:
                self.scatter(layer, staging, sharing.rows, sharing.turn)
            else:
                self.gather(layer, staging, sharing.rows)


def _parts(layer: PagedLayer, staging: Tensor, rows: Rows) -> Iterator[Part]:
    """Of K and, where there is one, V."""
    block_size = layer.k.shape[1]
    place = rows.slots // block_size, rows.slots % block_size
    whole_rows = staging.numel() // layer.row_bytes * layer.row_bytes
    for words, numbers in zip(layer.words, (rows.k_rows, rows.v_rows), strict=False):
        yield words, place, staging[:whole_rows].view(words.dtype).view(-1, *words.shape[2:]), numbers
