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
        k, word = first.words[0], first.words[0].element_size()
        addresses = [[layer.words[part].data_ptr() for part in (0, -1)] for layer in layers]
        self._addresses = torch.tensor(addresses, device=first.device)
        self._place = {layer: number for number, layer in enumerate(layers)}
        self._word_bytes, self._row_bytes, self._num_rows = word, first.row_bytes, first.num_rows
        self._across = first.row_bytes // word
        self._down, self._columns = tile(self._across)
        self._constants = (*k.shape[1:], *k.stride()[:3], self._down, self._columns, first.parts)
        self._types = WORDS[word], word if any(address % 16 for address in addresses[0]) else 16
        self._compiled: dict[bool, Any] = {}

    def move(self, scatter: bool, sharing: Sharing, handle: int | None) -> None:
        """Scatter or gather; staging begins at a multiple of 16, and so does every layer's part of it."""
        layers, staging, layer_bytes, rows = sharing
        count = rows.slots.shape[0]
        numbers = (
            *(count, self._num_rows, layer_bytes // self._row_bytes, layer_bytes // self._word_bytes),
            *(*self._constants, scatter, *self._types),
        )
        if scatter not in self._compiled:
            tensors = (self._addresses, staging, rows.slots, rows.k_rows, rows.v_rows)
            self._compiled[scatter] = compiled_kernel(triton_source.move_layers, (*tensors, *numbers))
        places = self._addresses.data_ptr() + 16 * self._place[layers[0]]
        grid = -(-count // self._down), -(-self._across // self._columns), len(layers)
        self._compiled[scatter][grid](places, staging.data_ptr(), *rows.addresses(), *numbers, stream=handle)
