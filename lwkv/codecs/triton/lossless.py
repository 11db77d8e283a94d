"""Lossless pages in Triton: one launch decodes pages, three code them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from lwkv.codecs.lossless_form import GROUP, HEADER_BYTES, MAGIC, VERSION, LosslessForm
from lwkv.codecs.page_codec import Flags, PagedCoder
from lwkv.codecs.triton import decode_source, encode_source
from lwkv.codecs.triton.launch import Kernel, Pointer
from lwkv.codecs.triton.places import PLACES, SLOTS, cache_places
from lwkv.kernels.triton.launch import is_callable_compiled
from lwkv.layouts.paged_layer import PagedLayer

BLOCK = 1024
CODED = tuple(Pointer(0, dtype) for dtype in (torch.uint8, torch.int16, torch.int32))
RAW = Pointer(1, torch.int32)


class Tuning(NamedTuple):
    """Words that a program works on at once, a power of two, and its warps: to decode pages, to code them."""

    decode_words: int = 1024
    decode_warps: int = 2
    encode_words: int = 1024
    encode_warps: int = 2


class Kernels:
    """The kernels of one form of pages, which differ in where rows are when they are not coded.

    Args:
        decode, encode, collect: see `lwkv.codecs.triton.decode_source` and `encode_source`.
        pointers: what these take besides the coded pages.
        most_rows: of a tile at most, a multiple of 16.
        where: further constants.
    """

    def __init__(
        self,
        form: LosslessForm,
        tuning: Tuning,
        kernels: tuple[object, object, object],
        pointers: Sequence[Pointer],
        most_rows: int,
        where: Sequence[int] = (),
    ) -> None:
        self._form, self._most_rows = form, most_rows
        self._pairs = form.width // 2
        self._columns: int = triton.next_power_of_2(self._pairs)
        decoded, coded = map(self._groups, (tuning.decode_words, tuning.encode_words))
        self._decode_tiles, self._encode_tiles = -(-form.groups // decoded), -(-form.groups // coded)
        given = (*CODED, *pointers)
        decode, encode, collect = kernels
        self._decode = Kernel(decode, given, (*self._constants(decoded), *where), tuning.decode_warps)
        self._encode = Kernel(encode, given, (*self._constants(coded), *where), tuning.encode_warps)
        self._collect = Kernel(collect, given, (*self._constants(coded), *where), tuning.encode_warps)
        header = form.rows, self._pairs, form.groups, form.num_starts, form.page_bytes, form.escapes_at
        constants = (*header, *MAGIC, VERSION, BLOCK)
        self._number = Kernel(encode_source.number, (CODED[0], CODED[2]), constants, tuning.encode_warps)

    def encode(
        self, num_pages: int, tensors: Sequence[Tensor], handle: int | None, numbers: Sequence[int] = ()
    ) -> None:
        """Queue what codes so many pages, all layers together; `tensors` begin with the coded ones."""
        tiles = self._encode_tiles, num_pages, 1
        self._encode(tiles, tensors, handle, numbers)
        self._number((num_pages, 1, 1), tensors, handle)
        self._collect(tiles, tensors, handle, numbers)

    def decode(
        self, num_pages: int, tensors: Sequence[Tensor], handle: int | None, numbers: Sequence[int] = ()
    ) -> None:
        """Queue what decodes so many pages."""
        self._decode((self._decode_tiles, num_pages, 1), tensors, handle, numbers)

    def _groups(self, words: int) -> int:
        """Of a tile, a power of two."""
        rows = min(max(words // self._columns, GROUP), self._most_rows)
        return 1 << ((rows // GROUP).bit_length() - 1)

    def _constants(self, groups: int) -> tuple[int, ...]:
        form = self._form
        sizes = form.rows, self._pairs, self._columns, form.groups, form.page_bytes
        return (*sizes, form.tops_at, form.codes_at, form.signs_at, form.escapes_at, groups)


class TritonLossless:
    """A `Coder` for devices with Triton. The first calls compile, for about a second."""

    def __init__(self, form: LosslessForm, tuning: Tuning = Tuning()) -> None:  # noqa: B008
        self._form, self._tuning = form, tuning
        self.raw_bytes, self.page_bytes, self.head_bytes = form.raw_bytes, form.page_bytes, form.head_bytes
        self.header_bytes = HEADER_BYTES
        self.takes_handles = is_callable_compiled(decode_source.decode)
        kernels = decode_source.decode, encode_source.encode, encode_source.collect
        self._kernels = Kernels(form, tuning, kernels, [RAW], most_rows=form.groups * GROUP)

    def paged(self, layers: Sequence[PagedLayer]) -> PagedCoder | None:
        serves = PagedLossless.serves(self._form, layers)
        return PagedLossless(self._form, layers, self._tuning) if serves else None

    def encode(self, raw: Tensor, coded: Tensor, num_pages: int, handle: int | None = None) -> None:
        self._kernels.encode(num_pages, (coded, raw), handle)

    def decode(self, coded: Tensor, raw: Tensor, num_pages: int, handle: int | None = None) -> None:
        self._kernels.decode(num_pages, (coded, raw), handle)

    def whole(self, heads: npt.NDArray[np.uint8]) -> Flags:
        return self._form.whole(heads)

    def fits(self, headers: npt.NDArray[np.uint8]) -> Flags:
        return self._form.fits(headers)


class PagedLossless:
    """A `PagedCoder` for devices with Triton."""

    def __init__(self, form: LosslessForm, layers: Sequence[PagedLayer], tuning: Tuning) -> None:
        first = layers[0]
        self.takes_handles = is_callable_compiled(decode_source.decode_to_cache)
        self._places, alignment = cache_places(layers, 4)
        self._cache_rows = first.num_rows
        # A tile is of one part.
        rows = form.rows // first.parts
        most = rows & -rows if first.parts > 1 else form.groups * GROUP
        kernels = (
            decode_source.decode_to_cache,
            encode_source.encode_from_cache,
            encode_source.collect_from_cache,
        )
        where = (*_cache_constants(first), alignment)
        self._kernels = Kernels(form, tuning, kernels, [PLACES, SLOTS], most, where)

    @staticmethod
    def serves(form: LosslessForm, layers: Sequence[PagedLayer]) -> bool:
        """Whether layers are alike, rows can be read in words of two elements, and V begins with a group."""
        first = layers[0]
        are_alike = len({layer.form for layer in layers}) == 1
        rows = form.rows // first.parts
        return are_alike and first.words[0].element_size() >= 4 and (first.parts == 1 or rows % GROUP == 0)

    def encode(
        self,
        layers: Sequence[PagedLayer],
        slots: Tensor,
        coded: Tensor,
        num_pages: int,
        handle: int | None = None,
    ) -> None:
        tensors, numbers = (coded, self._places[layers[0]], slots), (num_pages, self._cache_rows)
        self._kernels.encode(num_pages * len(layers), tensors, handle, numbers)

    def decode(
        self,
        layers: Sequence[PagedLayer],
        slots: Tensor,
        coded: Tensor,
        num_pages: int,
        handle: int | None = None,
    ) -> None:
        tensors, numbers = (coded, self._places[layers[0]], slots), (num_pages, self._cache_rows)
        self._kernels.decode(num_pages * len(layers), tensors, handle, numbers)


def _cache_constants(layer: PagedLayer) -> tuple[int, ...]:
    """Sizes of a layer, and its strides in words of two elements."""
    block, token, head, _ = (stride // 2 for stride in layer.k.stride())
    return layer.parts, layer.heads, layer.k.shape[1], block, token, head
