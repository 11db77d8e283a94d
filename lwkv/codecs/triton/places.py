"""Where the rows of an engine's layers are, for kernels that code from there and decode to there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lwkv.codecs.triton.launch import Pointer
from lwkv.layouts.paged_layer import PagedLayer

PLACES, SLOTS = Pointer(1, torch.int64), Pointer(2, torch.int64)
ALIGNMENT = 16


def cache_places(layers: Sequence[PagedLayer], word_bytes: int) -> tuple[Mapping[PagedLayer, Tensor], int]:
    """For each layer the addresses of K and V from this layer on, int64 on the device; their alignment.

    That is 16 bytes, or `word_bytes` where one address is no multiple of these.
    """
    addresses = [[view.data_ptr() for view in (layer.words[0], layer.words[-1])] for layer in layers]
    places = torch.tensor(addresses, device=layers[0].device)
    aligned = all(address % ALIGNMENT == 0 for pair in addresses for address in pair)
    by_layer = {layer: places[number:] for number, layer in enumerate(layers)}
    return by_layer, ALIGNMENT if aligned else word_bytes


def cache_constants(layer: PagedLayer, elements: int) -> tuple[int, ...]:
    """Parts, heads and block size of a layer, and its strides of a block, a token and a head, in words of so
    many `elements`."""
    block, token, head, _ = (stride // elements for stride in layer.k.stride())
    return layer.parts, layer.heads, layer.k.shape[1], block, token, head
