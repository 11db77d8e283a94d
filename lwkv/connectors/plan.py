"""A transfer made ready for one device: row tables there, page sizes and slices here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lwkv.connectors.upload import Uploads
from lwkv.kernels import Rows
from lwkv.layer_copies import LayerCopies
from lwkv.paged_layer import PagedLayer
from lwkv.platforms import CopyBatch
from lwkv.platforms.protocol import Int64s
from lwkv.pool import HostPool
from lwkv.transfer import PageShape, Transfer

FIRST_LAYERS = 2

FullRows: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


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


class Cut:
    """How transfers are cut: in chunks of `chunk_size` tokens, and so many chunks in a staging buffer.

    Attributes:
        alike: whether pages of all layers are cut into the same rows of the same size.
        full_rows: for each shape of pages, where K and V rows of full chunks lie in a staging buffer full of
            them: int64 (rows,) each, on the device. The same for every request.
    """

    def __init__(self, layers: Sequence[PagedLayer], chunk_size: int, chunks_per_slice: int) -> None:
        self.chunk_size = chunk_size
        self.chunks_per_slice = chunks_per_slice
        forms = {(page_shape(layer, chunk_size), layer.row_bytes) for layer in layers}
        self.alike = len(forms) == 1
        self.full_rows = {shape: _full_rows(shape, chunks_per_slice, layers[0].device) for shape, _ in forms}


class Plan:
    """A transfer cut into slices of as many chunks as a staging buffer holds.

    The copies need nothing of the device; the rows, made and uploaded on first use, come after them.
    """

    def __init__(self, transfer: Transfer, uploads: Uploads, pool: HostPool, cut: Cut) -> None:
        self.transfer = transfer
        self.uploads = uploads
        self._pool = pool
        self._cut = cut
        self._slices: dict[PageShape, list[Slice]] = {}
        self._known: Int64s | None = None
        self._prepared: list[LayerCopies] = []
        self._num_prepared = 0

    def only(self, chunks: npt.NDArray[np.bool_]) -> Plan:
        """The same without the chunks that are False, bool (chunks,)."""
        return Plan(self.transfer.only(chunks), self.uploads, self._pool, self._cut)

    def slices(self, layer: PagedLayer) -> list[Slice]:
        """The rows of `layer` to move, a staging buffer at a time."""
        shape = page_shape(layer, self._cut.chunk_size)
        if shape not in self._slices:
            whole = self.transfer.is_whole(self._cut.chunk_size)
            self._slices[shape] = self._full_slices(shape) if whole else self._make_slices(shape)
        return self._slices[shape]

    def know(self, pages: Int64s) -> None:
        """Take all layers' pages, int64 (layers, chunks): copies are made together where layers are alike."""
        if self._cut.alike:
            self._known = pages

    def copies(self, number: int, layer: PagedLayer, pages: Int64s) -> list[CopyBatch]:
        """The copies of one layer, a batch for each slice; `pages`, int64 (chunks,), unless known before."""
        if self._known is None:
            return [copies[0] for copies in self._make_copies(layer, pages[None])]
        if number >= self._num_prepared:
            # The first layers by themselves: they are in a hurry.
            self._num_prepared = FIRST_LAYERS if number < FIRST_LAYERS else len(self._known)
            self._prepared = self._make_copies(layer, self._known[: self._num_prepared])
        return [copies[number] for copies in self._prepared]

    def _make_copies(self, layer: PagedLayer, pages: Int64s) -> list[LayerCopies]:
        """Of layers that are all like `layer`, for each slice; `pages` is int64 (layers, chunks)."""
        cut, shape = self._cut, page_shape(layer, self._cut.chunk_size)
        sizes, stride = self.transfer.page_rows(shape) * layer.row_bytes, layer.page_bytes(cut.chunk_size)
        starts = range(0, len(sizes), cut.chunks_per_slice)
        slices = [slice(start, start + cut.chunks_per_slice) for start in starts]
        return [self._pool.copy_batches(pages[:, chunks], sizes[chunks], stride) for chunks in slices]

    def _full_slices(self, shape: PageShape) -> list[Slice]:
        slots = self.transfer.row_slots(shape.tokens_per_row)
        if not len(slots):
            return []
        on_device, full = self.uploads.send(torch.from_numpy(slots)), self._cut.full_rows[shape]
        step = self._cut.chunks_per_slice * shape.rows
        if len(slots) <= step:
            return [Slice(0, len(slots), Rows(on_device, *_first(full, len(slots))))]
        bounds = [*range(0, len(slots), step), len(slots)]
        return [Slice(a, b, Rows(on_device[a:b], *_first(full, b - a))) for a, b in pairwise(bounds)]

    def _make_slices(self, shape: PageShape) -> list[Slice]:
        numbers, bounds = self.transfer.rows(shape, self._cut.chunks_per_slice)
        values = torch.from_numpy(numbers)
        on_device = self.uploads.send(values) if numbers.size else values
        return [Slice(a, b, Rows(*on_device[:, a:b].unbind())) for a, b in pairwise(bounds)]


def _full_rows(shape: PageShape, num_chunks: int, device: torch.device) -> FullRows:
    """Make them for so many chunks; returns when they are on the device."""
    starts = np.arange(num_chunks)[:, None] * (shape.parts * shape.rows)
    k_rows = torch.from_numpy((starts + np.arange(shape.rows)).reshape(-1)).to(device)
    return k_rows, k_rows + shape.rows


def _first(full: FullRows, num_rows: int) -> FullRows:
    """The tables of the first rows: as they are where that is all, since cutting takes a while."""
    k_rows, v_rows = full
    return full if num_rows == k_rows.shape[0] else (k_rows[:num_rows], v_rows[:num_rows])
