"""A transfer made ready for one device: row tables there, page sizes and slices here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lwkv.connectors.upload import Uploads
from lwkv.kernels import Rows
from lwkv.paged_layer import PagedLayer
from lwkv.platforms.protocol import Int64s
from lwkv.transfer import PageShape, Transfer


def page_shape(layer: PagedLayer, chunk_size: int) -> PageShape:
    """How pages of `layer` are cut into rows."""
    return PageShape(layer.parts, chunk_size // layer.tokens_per_row, layer.tokens_per_row)


@dataclass(frozen=True, slots=True)
class Slice:
    """Chunks [first, last) of a transfer, which fit a staging buffer, and the rows of them that are moved.

    These are rows [first_row, last_row) of all that the transfer moves.
    """

    first: int
    last: int
    first_row: int
    last_row: int
    rows: Rows


class Plan:
    """The slices of a transfer for every page shape that the layers have, made and uploaded on first use."""

    def __init__(self, transfer: Transfer, uploads: Uploads, chunk_size: int, chunks_per_slice: int) -> None:
        self.transfer = transfer
        self.uploads = uploads
        self.chunk_size = chunk_size
        self._chunks_per_slice = chunks_per_slice
        self._slices: dict[PageShape, list[Slice]] = {}
        self._sizes: dict[tuple[PageShape, int], Int64s] = {}

    def slices(self, layer: PagedLayer) -> list[Slice]:
        """What to move of `layer`, a staging buffer at a time."""
        shape = page_shape(layer, self.chunk_size)
        if shape not in self._slices:
            self._slices[shape] = self._make_slices(shape)
        return self._slices[shape]

    def sizes(self, layer: PagedLayer) -> Int64s:
        """Bytes in use in each chunk's page of `layer`, int64 (chunks,)."""
        shape = page_shape(layer, self.chunk_size)
        key = shape, layer.row_bytes
        if key not in self._sizes:
            self._sizes[key] = self.transfer.page_rows(shape) * layer.row_bytes
        return self._sizes[key]

    def _make_slices(self, shape: PageShape) -> list[Slice]:
        table, bounds = self.transfer.rows(shape, self._chunks_per_slice)
        if not table.size:
            return []
        on_device = self.uploads.send(torch.from_numpy(table))
        step, end = self._chunks_per_slice, self.transfer.num_chunks
        return [
            Slice(first, min(first + step, end), a, b, Rows(*on_device[:, a:b].unbind()))
            for first, a, b in zip(range(0, end, step), bounds[:-1], bounds[1:], strict=True)
            if b > a
        ]
