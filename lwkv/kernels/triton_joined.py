"""Rows of several layers, moved by one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from lwkv.kernels import triton_source
from lwkv.kernels.protocol import Sharing
from lwkv.kernels.triton_launch import compiled_kernel, tile
from lwkv.paged_layer import PagedLayer

WORDS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


class JoinedLayers:
    """Layers of one form, of which neighbours are moved together; the kernel reads where each of them is.

    The first call in each direction compiles.
    """

    def __init__(self, layers: Sequence[PagedLayer]) -> None:
        first = layers[0]
        k, _ = first.words
        self._place = {id(layer): number for number, layer in enumerate(layers)}
        self._addresses = torch.tensor(
            [
                [view.data_ptr() for view in (layer.k, layer.k if layer.v is None else layer.v)]
                for layer in layers
            ],
            device=first.device,
        )
        self._layers = layers
        self._word_bytes, self._row_bytes, self._num_rows = k.element_size(), first.row_bytes, first.num_rows
        self._across = first.row_bytes // k.element_size()
        self._down, self._columns = tile(self._across)
        views = [first.k] if first.v is None else [first.k, first.v]
        aligned = all(view.data_ptr() % 16 == 0 for view in views)
        self._constants = (*k.shape[1:], *k.stride()[:3], self._down, self._columns, first.parts)
        self._types = WORDS[self._word_bytes], 16 if aligned else self._word_bytes
        self._compiled: dict[bool, Any] = {}

    def move(self, scatter: bool, sharing: Sharing, handle: int | None) -> None:
        """Scatter or gather; staging begins at a multiple of 16, and so does every layer's part of it."""
        layers, staging, layer_bytes, rows = sharing
        count = rows.slots.shape[0]
        numbers = (
            *(count, self._num_rows, layer_bytes // self._row_bytes, layer_bytes // self._word_bytes),
            *(*self._constants, scatter, *self._types),
        )
        kernel = self._compiled.get(scatter)
        if kernel is None:
            pointers = (self._addresses, staging, rows.slots, rows.k_rows, rows.v_rows)
            kernel = self._compiled[scatter] = compiled_kernel(
                triton_source.move_layers, (*pointers, *numbers)
            )
        places = self._addresses.data_ptr() + 16 * self._place[id(layers[0])]
        grid = -(-count // self._down), -(-self._across // self._columns), len(layers)
        kernel[grid](places, staging.data_ptr(), *rows.addresses(), *numbers, stream=handle)
