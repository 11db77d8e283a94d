"""Rows of several layers, moved by one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from lwkv.kernels.triton import source
from lwkv.kernels.triton.launch import Key, Launch, sizes_and_strides
from lwkv.layouts.paged_layer import PagedLayer

WORDS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def join_layers(
    layers: Sequence[PagedLayer], compiled: dict[Key, Any]
) -> dict[tuple[bool, PagedLayer], Launch]:
    """For each direction, True to scatter, and each of these layers what moves it and those behind it.

    All are of one form; the kernel reads in a table where each of them is. Staging begins at a multiple of
    16, and so does every layer's part of it.
    """
    first, k = layers[0], layers[0].words[0]
    addresses = [[layer.words[part].data_ptr() for part in (0, -1)] for layer in layers]
    table, word = torch.tensor(addresses, device=first.device), k.element_size()
    types = WORDS[word], word if any(address % 16 for address in addresses[0]) else 16
    across = first.row_bytes // word
    joined = {}
    for number, layer in enumerate(layers):
        for scatter in (True, False):
            views, constants = (table[number:],), (*sizes_and_strides(k), scatter, *types)
            joined[scatter, layer] = Launch(source.move_layers, layer, views, across, constants, (), compiled)
    return joined
