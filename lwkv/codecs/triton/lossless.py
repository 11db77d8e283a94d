"""Lossless pages in Triton: one launch decodes pages, three code them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from lwkv.codecs.lossless_form import GROUP, MAGIC, VERSION, LosslessForm
from lwkv.codecs.page_codec import PagedCoder
from lwkv.codecs.triton import decode_source, encode_source
from lwkv.codecs.triton.launch import Kernel, Pointer
from lwkv.codecs.triton.pages import PagesInCache, TritonPages
from lwkv.codecs.triton.places import PLACES, SLOTS, cache_constants, cache_places
from lwkv.kernels.triton.launch import is_callable_compiled
from lwkv.layouts.paged_layer import PagedLayer

BLOCK = 1024
CODED = tuple(Pointer(0, dtype) for dtype in (torch.uint8, torch.int16, torch.int32))
RAW = Pointer(1, torch.int32)


class LosslessTuning(NamedTuple):
    """Words that a program works on at once, a power of two, and its warps: to decode pages, to code them."""

    decode_words: int = 1024
    decode_warps: int = 2
    encode_words: int = 1024
    encode_warps: int = 2


class LosslessKernels:
    """`PageKernels` of lossless pages.

    Args:
        decode, encode, collect: see `lwkv.codecs.triton.decode_source` and `encode_source`.
        pointers: what these take besides the coded pages.
        most_rows: of a tile at most, a multiple of 16.
        where: further constants.
    """

    def __init__(
        self,
        form: LosslessForm,
        tuning: LosslessTuning,
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
        tiles = self._encode_tiles, num_pages, 1
        self._encode(tiles, tensors, handle, numbers)
        self._number((num_pages, 1, 1), tensors, handle)
        self._collect(tiles, tensors, handle, numbers)

    def decode(
        self, num_pages: int, tensors: Sequence[Tensor], handle: int | None, numbers: Sequence[int] = ()
    ) -> None:
        self._decode((self._decode_tiles, num_pages, 1), tensors, handle, numbers)

    def _groups(self, words: int) -> int:
        """Of a tile, a power of two."""
        rows = min(max(words // self._columns, GROUP), self._most_rows)
        return 1 << ((rows // GROUP).bit_length() - 1)

    def _constants(self, groups: int) -> tuple[int, ...]:
        form = self._form
        sizes = form.rows, self._pairs, self._columns, form.groups, form.page_bytes
        return (*sizes, form.tops_at, form.codes_at, form.signs_at, form.escapes_at, groups)


class TritonLossless(TritonPages[LosslessForm]):
    """A `Coder` for devices with Triton."""

    def __init__(self, form: LosslessForm, tuning: LosslessTuning = LosslessTuning()) -> None:  # noqa: B008
        self._tuning = tuning
        sources = decode_source.decode, encode_source.encode, encode_source.collect
        kernels = LosslessKernels(form, tuning, sources, [RAW], most_rows=form.groups * GROUP)
        super().__init__(form, kernels, is_callable_compiled(decode_source.decode))

    def paged(self, layers: Sequence[PagedLayer]) -> PagedCoder | None:
        serves = _serves(self._form, layers)
        return _in_cache(self._form, layers, self._tuning) if serves else None


def _serves(form: LosslessForm, layers: Sequence[PagedLayer]) -> bool:
    """Whether layers are alike, rows can be read in words of two elements, and V begins with a group."""
    first = layers[0]
    are_alike = len({layer.form for layer in layers}) == 1
    rows = form.rows // first.parts
    return are_alike and first.words[0].element_size() >= 4 and (first.parts == 1 or rows % GROUP == 0)


def _in_cache(form: LosslessForm, layers: Sequence[PagedLayer], tuning: LosslessTuning) -> PagesInCache:
    """For layers that it serves."""
    first = layers[0]
    places, alignment = cache_places(layers, 4)
    # A tile is of one part.
    rows = form.rows // first.parts
    most = rows & -rows if first.parts > 1 else form.groups * GROUP
    decode, encode = decode_source.decode_to_cache, encode_source.encode_from_cache
    sources = decode, encode, encode_source.collect_from_cache
    where = (*cache_constants(first, 2), alignment)
    kernels = LosslessKernels(form, tuning, sources, [PLACES, SLOTS], most, where)
    return PagesInCache(kernels, places, first.num_rows, is_callable_compiled(decode))
