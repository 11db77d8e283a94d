"""A transfer made ready for one device: row tables there, page sizes and slices here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from lwkv.connectors.upload import Uploads
from lwkv.kernels import Rows
from lwkv.paged_layer import PagedLayer
from lwkv.platforms import CopyBatch
from lwkv.platforms.protocol import Int64s
from lwkv.pool import HostPool
from lwkv.transfer import PageShape, Transfer


def page_shape(layer: PagedLayer, chunk_size: int) -> PageShape:
    """How pages of `layer` are cut into rows."""
    return PageShape(layer.parts, chunk_size // layer.tokens_per_row, layer.tokens_per_row)


@dataclass(frozen=True, slots=True)
class Slice:
    """The rows that are moved of the chunks of one staging buffer.

    These are rows [first_row, last_row) of all that the transfer moves.
    """

    first_row: int
    last_row: int
    rows: Rows


class Plan:
    """A transfer cut into slices of as many chunks as a staging buffer holds.

    The copies need nothing of the device; the rows, made and uploaded on first use, come after them.
    """

    def __init__(
        self, transfer: Transfer, uploads: Uploads, pool: HostPool, chunk_size: int, chunks_per_slice: int
    ) -> None:
        self.transfer = transfer
        self.uploads = uploads
        self._pool = pool
        self._chunk_size = chunk_size
        self._chunks_per_slice = chunks_per_slice
        self._slices: dict[PageShape, list[Slice]] = {}
        self._prepared: list[Sequence[CopyBatch]] = []

    def slices(self, layer: PagedLayer) -> list[Slice]:
        """The rows of `layer` to move, a staging buffer at a time."""
        shape = page_shape(layer, self._chunk_size)
        if shape not in self._slices:
            self._slices[shape] = self._make_slices(shape)
        return self._slices[shape]

    def prepare(self, layers: Sequence[PagedLayer], pages: Int64s) -> None:
        """Make the copies of all layers now: cheaper than one by one. Pages are int64 (layers, chunks)."""
        if all(self._kind(layer) == self._kind(layers[0]) for layer in layers):
            self._prepared = [self._batches(first, layers[0], pages) for first in self._firsts()]

    def copies(self, number: int, layer: PagedLayer, pages: Int64s) -> list[CopyBatch]:
        """The copies of one layer, a batch for each slice; `pages`, int64 (chunks,), unless prepared."""
        if self._prepared:
            return [layers[number] for layers in self._prepared]
        return [self._batches(first, layer, pages[None])[0] for first in self._firsts()]

    def _firsts(self) -> range:
        return range(0, self.transfer.num_chunks, self._chunks_per_slice)

    def _batches(self, first: int, layer: PagedLayer, pages: Int64s) -> Sequence[CopyBatch]:
        chunks = slice(first, first + self._chunks_per_slice)
        sizes = self.transfer.page_rows(page_shape(layer, self._chunk_size))[chunks] * layer.row_bytes
        return self._pool.copy_batches(pages[:, chunks], sizes, layer.page_bytes(self._chunk_size))

    def _kind(self, layer: PagedLayer) -> tuple[PageShape, int]:
        return page_shape(layer, self._chunk_size), layer.row_bytes

    def _make_slices(self, shape: PageShape) -> list[Slice]:
        table, bounds = self.transfer.rows(shape, self._chunks_per_slice, self._new_table)
        on_device = self.uploads.send_table(table) if table.size else torch.from_numpy(table)
        return [Slice(a, b, Rows(*on_device[:, a:b].unbind())) for a, b in pairwise(bounds)]

    def _new_table(self, num_rows: int) -> Int64s:
        return self.uploads.new_table(3, num_rows) if num_rows else np.zeros((3, 0), np.int64)
