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
RowMove: TypeAlias = "tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]"


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
        for part, (cache, place, packed, numbers) in enumerate(_row_moves(layer, staging, rows)):
            words = packed.index_select(0, numbers)
            if turn is not None and part == 0:
                rotate(words.view(layer.dtype), turn)
            cache[place] = words

    @torch.inference_mode()
    def gather(self, layer: PagedLayer, staging: Tensor, rows: Rows) -> None:
        for cache, place, packed, numbers in _row_moves(layer, staging, rows):
            packed[numbers] = cache[place]

    def prepare(self, layers: Sequence[PagedLayer]) -> None:
        pass

    def move_layers(self, scatter: bool, staged: StagedLayers, handle: int | None = None) -> None:
        for layer, staging in staged.one_by_one():
            if scatter:
                self.scatter(layer, staging, staged.rows, staged.turn)
            else:
                self.gather(layer, staging, staged.rows)


def _row_moves(layer: PagedLayer, staging: Tensor, rows: Rows) -> Iterator[RowMove]:
    """Of K and, where there is one, V."""
    block_size = layer.k.shape[1]
    place = rows.slots // block_size, rows.slots % block_size
    whole_rows = staging.numel() // layer.row_bytes * layer.row_bytes
    for words, numbers in zip(layer.words, (rows.k_rows, rows.v_rows), strict=False):
        yield words, place, staging[:whole_rows].view(words.dtype).view(-1, *words.shape[2:]), numbers
