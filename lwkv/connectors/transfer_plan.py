"""A transfer made ready for one device: row tables there, page sizes and slices here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lwkv.codecs import Coding, PageCheck, PageCodec, PagedCoder
from lwkv.connectors.row_tables import RowTables, Table
from lwkv.kernels import Rows, StagedLayers
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import CopyBatch, Int64s, Platform, Stream
from lwkv.pool.host_pool import HostPool
from lwkv.pool.page_copies import PageCopies, first_batch
from lwkv.pool.spill_copies import spill_batch
from lwkv.transfer import PageShape, Transfer

FIRST_LAYERS = 2
MOST_AT_ONCE = 1 << 13
"""Pages whose copies are worked out in one go: twice takes longer than a few more at a time."""
FEW_PAGES = 64
"""Of a layer, whose copies by themselves are worked out sooner one by one than as arrays."""
ALIGNMENT = 16


def page_shape(layer: PagedLayer, chunk_size: int) -> PageShape:
    """How pages of `layer` are cut into rows."""
    return PageShape(layer.parts, chunk_size // layer.tokens_per_row, layer.tokens_per_row)


class Slice(NamedTuple):
    """The rows that are moved of the chunks of one staging buffer.

    These are rows [first_row, last_row) of all that the transfer moves.
    """

    first_row: int
    last_row: int
    rows: Rows


class SliceShape:
    """How transfers are cut: in chunks of `chunk_size` tokens, and so many chunks in a staging buffer.

    Attributes:
        shape: of all pages, if rows of all layers are of one size, too; else None.
        may_share: whether several layers may share a staging buffer: they differ only in where they are.
        shared_page_bytes: bytes of a full raw page of such layers.
        full_rows: for each shape of pages, where K and V rows of full chunks lie in a staging buffer full of
            them: two of int64 (rows,), on the device. The same for every request.
    """

    def __init__(self, layers: Sequence[PagedLayer], chunk_size: int, chunks_per_slice: int) -> None:
        self.chunk_size = chunk_size
        self.chunks_per_slice = chunks_per_slice
        forms = {(page_shape(layer, chunk_size), layer.row_bytes) for layer in layers}
        self.shape = next(iter(forms))[0] if len(forms) == 1 else None
        full = Transfer(np.full(chunks_per_slice, chunk_size), np.arange(chunks_per_slice * chunk_size))
        rows = {shape: torch.from_numpy(full.rows(shape, chunks_per_slice)[0][1:]) for shape, _ in forms}
        self.full_rows = {shape: numbers.to(layers[0].device).unbind() for shape, numbers in rows.items()}
        self._first_rows: dict[tuple[PageShape, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.shared_page_bytes = layers[0].page_bytes(chunk_size)
        self.may_share = (
            self.shared_page_bytes % ALIGNMENT == 0 and len({layer.form for layer in layers}) == 1
        )

    def first_rows(self, shape: PageShape, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `count` of `full_rows`, K's and V's: made once, as each view takes torch a while."""
        found = self._first_rows.get((shape, count))
        if found is None:
            k_rows, v_rows = self.full_rows[shape]
            found = self._first_rows[shape, count] = k_rows[:count], v_rows[:count]
        return found

    def layers_per_buffer(self, num_chunks: int) -> int:
        """How many layers of so many chunks may share a staging buffer; at least 1."""
        return max(1, self.chunks_per_slice // num_chunks) if self.may_share and num_chunks else 1


class TransferPlan:
    """A transfer cut into slices of as many chunks as a staging buffer holds, or several layers in one.

    The copies need nothing of the device; the rows, made and uploaded on first use, come after them.

    Attributes:
        num_slices: slices of every layer.
        is_coded: whether pages have to be decoded and coded on the device.
        layers_per_buffer: how many may share a staging buffer: 1 unless all pages are known and layers alike.
        is_whole: whether all chunks are full, and all of their tokens are moved.
        layer_bytes: of raw pages of one layer, where several share a staging buffer.

    Args:
        pages: of all layers, int64 (layers, chunks), if they are known: copies are made together where layers
            are alike.
    """

    def __init__(
        self,
        transfer: Transfer,
        uploads: RowTables,
        pool: HostPool,
        codec: PageCodec,
        cut: SliceShape,
        pages: Int64s | None = None,
    ) -> None:
        self.transfer = transfer
        self.uploads = uploads
        self._pool = pool
        self._codec = codec
        self._slice_shape = cut
        self.is_coded = codec.is_coded
        self._known = pages if cut.shape else None
        self.num_slices = -(-transfer.num_chunks // cut.chunks_per_slice)
        self.layers_per_buffer = 1 if self._known is None else cut.layers_per_buffer(transfer.num_chunks)
        # Of no use where a layer is alone, and the same for all that share.
        self.layer_bytes = transfer.num_chunks * cut.shared_page_bytes
        self._slices: dict[PageShape, list[Slice]] = {}
        self._prepared: list[PageCopies] = []
        self._num_prepared = 0

    def only(self, chunks: npt.NDArray[np.bool_]) -> TransferPlan:
        """The same without the chunks that are False, bool (chunks,)."""
        return TransferPlan(
            self.transfer.only(chunks), self.uploads, self._pool, self._codec, self._slice_shape
        )

    def slices(self, layer: PagedLayer) -> list[Slice]:
        """The rows of `layer` to move, a staging buffer at a time."""
        shape = self._slice_shape.shape or page_shape(layer, self._slice_shape.chunk_size)
        if shape not in self._slices:
            self._slices[shape] = self._full_slices(shape) if self.is_whole else self._make_slices(shape)
        return self._slices[shape]

    @cached_property
    def is_whole(self) -> bool:
        return self.transfer.is_whole(self._slice_shape.chunk_size)

    @property
    def is_plain(self) -> bool:
        """Whether all pages are known, raw and full, and all that is moved of a layer fits into a buffer."""
        return self._known is not None and not self.is_coded and self.num_slices == 1 and self.is_whole

    def num_pages(self, number: int) -> int:
        """Pages of each layer in slice `number`."""
        return len(self.transfer.chunk_tokens[self._chunks(number)])

    def has_spill(self, layers: range, number: int, pages: Int64s) -> bool:
        """Whether there are raw pages beside some of slice `number` of `layers`; `pages` as for `copy`."""
        return any(self._pool.spill_of(self.pages_of(i, pages)[self._chunks(number)]) for i in layers)

    def staged(self, layers: Sequence[PagedLayer], staging: torch.Tensor, rows: Rows) -> StagedLayers:
        """What is moved of layers whose raw pages lie in `staging`, page behind page."""
        return StagedLayers(layers, staging, self.layer_bytes, rows)

    def coding(self, layers: Sequence[PagedLayer], number: int) -> Coding:
        """How slice `number` of layers that share a staging buffer is coded, for pages that are."""
        coder = self._codec.coder(layers[0])
        if coder is None:
            raise ValueError(f"pages of layer {layers[0].name!r} are raw: there is nothing to code")
        tokens = self.transfer.chunk_tokens[self._chunks(number)]
        has_gaps = bool((tokens != self._slice_shape.chunk_size).any())
        return Coding(coder, len(layers) * len(tokens), has_gaps)

    def spill_copies(self, layer: PagedLayer, place: int, number: int, pages: Int64s) -> CopyBatch | None:
        """The copies between raw pages of slice `number` and spill pages; None where there are none.

        `layer` is number `place` of those whose raw pages lie together; `pages` are its own, int64 (chunks,).
        """
        mine = pages[self._chunks(number)]
        spill = self._pool.spill_of(mine)
        coder = self._codec.coder(layer)
        if not spill or coder is None:
            return None
        first_page = place * len(mine) + np.array(list(spill))
        return spill_batch(
            self._pool, first_page * coder.raw_bytes, np.stack([*spill.values()]), coder.raw_bytes
        )

    def pages_of(self, layer: int, pages: Int64s) -> Int64s:
        """The pages of `layer`, int64 (chunks,): those known from the beginning, or else `pages`."""
        return pages if self._known is None else self._known[layer]

    def copy(self, layers: range, number: int, layer: PagedLayer, pages: Int64s) -> CopyBatch:
        """Make the batch of copies between one staging buffer and the pages of slice `number` of `layers`.

        Nothing is queued. `layers` share the buffer, and all are like `layer`. `pages` are those of the first
        of them, int64 (chunks,); they are not looked at if the plan was given all pages.
        """
        if self._known is None:
            return self._make_copies(number, layer, pages[None]).batch(0, 1)
        if layers.stop > self._num_prepared:
            if layers.stop == 1 and self.is_whole and self.num_pages(number) <= FEW_PAGES:
                # Everything waits for the first copy.
                return first_batch(
                    self._pool.slabs, self._known[0, self._chunks(number)], self._codec.page_bytes(layer)
                )
            # The first layers by themselves: they are latency-critical.
            is_first = layers.stop <= FIRST_LAYERS and self._known.size > MOST_AT_ONCE
            self._prepare(FIRST_LAYERS if is_first else len(self._known), layer)
        return self._prepared[number].batch(layers.start, layers.stop)

    def all_copies(self, layer: PagedLayer) -> PageCopies:
        """The copies of all layers, which are like `layer`, of a plan that `is_plain`."""
        assert self._known is not None
        if self._num_prepared < len(self._known):
            self._prepare(len(self._known), layer)
        return self._prepared[0]

    def _prepare(self, num_layers: int, layer: PagedLayer) -> None:
        assert self._known is not None
        self._num_prepared, known = num_layers, self._known[:num_layers]
        self._prepared = [self._make_copies(i, layer, known) for i in range(self.num_slices)]

    def _make_copies(self, number: int, layer: PagedLayer, pages: Int64s) -> PageCopies:
        """Those of slice `number` of layers that are all like `layer`; `pages` is int64 (layers, chunks)."""
        chunks = self._chunks(number)
        sizes = self._codec.copied_bytes(layer, self.transfer.chunk_tokens[chunks])
        return PageCopies(self._pool.slabs, pages[:, chunks], sizes, self._codec.page_bytes(layer))

    def _chunks(self, number: int) -> slice:
        """The chunks of slice `number`."""
        start = number * self._slice_shape.chunks_per_slice
        return slice(start, start + self._slice_shape.chunks_per_slice)

    def _full_slices(self, shape: PageShape) -> list[Slice]:
        slots = self.transfer.row_slots(shape.tokens_per_row)
        known = self.transfer.device_slots
        on_device = self.uploads.send(slots) if known is None else self.uploads.keep(known)
        bounds = [*range(0, len(slots), self._slice_shape.chunks_per_slice * shape.rows), len(slots)]
        slices = []
        for a, b in pairwise(bounds):
            moved = on_device if b - a == len(slots) else on_device[a:b]
            slices.append(Slice(a, b, Rows(moved, *self._slice_shape.first_rows(shape, b - a))))
        return slices

    def _make_slices(self, shape: PageShape) -> list[Slice]:
        numbers, bounds = self.transfer.rows(shape, self._slice_shape.chunks_per_slice)
        on_device = self.uploads.send(numbers)
        return [Slice(a, b, Rows(*on_device[:, a:b].unbind())) for a, b in pairwise(bounds)]


class Plans:
    """Makes the plans of transfers between pages of a pool, made by a codec, and the rows of these layers.

    Args:
        chunks_per_slice: full pages in a staging buffer.

    Attributes:
        spare: tables that no plan uses any more, by size.
        paged_coder: what codes pages of full chunks without raw pages in between; None where nothing does.
    """

    def __init__(
        self,
        platform: Platform,
        layers: Sequence[PagedLayer],
        pool: HostPool,
        codec: PageCodec,
        chunk_size: int,
        chunks_per_slice: int,
    ) -> None:
        self.platform = platform
        self.layers = layers
        self.device = layers[0].device
        self.codec = codec
        self.slice_shape = SliceShape(layers, chunk_size, chunks_per_slice)
        self.spare: dict[int, list[Table]] = {}
        self.pool = pool
        coder = codec.coder(layers[0]) if self.slice_shape.may_share else None
        self.paged_coder: PagedCoder | None = None if coder is None else coder.paged(layers)

    def make(self, transfer: Transfer, stream: Stream, pages: Int64s | None = None) -> TransferPlan:
        """Plan `transfer`; its tables go to the device on `stream`. `pages` as TransferPlan's."""
        uploads = RowTables(self.platform, self.device, stream, self.spare)
        return TransferPlan(transfer, uploads, self.pool, self.codec, self.slice_shape, pages)

    def page_check(self) -> PageCheck:
        """What shows whether pages of these layers can be decoded."""
        return PageCheck(self.codec, self.layers, self.pool)
