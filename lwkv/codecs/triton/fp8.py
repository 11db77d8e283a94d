"""Pages of fp8 in Triton: one launch decodes pages, one codes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from lwkv.codecs.fp8_form import MAGIC, VERSION, Fp8Form
from lwkv.codecs.page_codec import PagedCoder
from lwkv.codecs.triton import fp8_source
from lwkv.codecs.triton.launch import Kernel, Pointer
from lwkv.codecs.triton.pages import PagesInCache, TritonPages
from lwkv.codecs.triton.places import PLACES, SLOTS, cache_constants, cache_places
from lwkv.kernels.triton.launch import is_callable_compiled
from lwkv.layouts.paged_layer import PagedLayer

BLOCK = 1024
CODED, WORDS = Pointer(0, torch.uint8), Pointer(0, torch.int32)


class Fp8Tuning(NamedTuple):
    """Elements that a program works on at once, a power of two, and its warps."""

    elements: int = 2048
    warps: int = 4


class Fp8Kernels:
    """`PageKernels` of fp8.

    Args:
        decode, encode: see `lwkv.codecs.triton.fp8_source`.
        pointers: what these take besides the coded pages.
        most_rows: of a tile at most, a power of two.
        where: further constants.
    """

    def __init__(
        self,
        form: Fp8Form,
        tuning: Fp8Tuning,
        kernels: tuple[object, object],
        pointers: Sequence[Pointer],
        most_rows: int,
        where: Sequence[int] = (),
    ) -> None:
        columns: int = triton.next_power_of_2(form.width)
        rows = min(max(tuning.elements // columns, 1), most_rows)
        self._tiles = -(-form.rows // rows)
        sizes = form.rows, form.width, columns, form.page_bytes, form.tops_at, form.codes_at, form.kind, rows
        decode, encode = kernels
        self._decode = Kernel(decode, (CODED, *pointers), (*sizes, *where), tuning.warps)
        header = form.largest_top, *MAGIC, VERSION, BLOCK
        self._encode = Kernel(encode, (CODED, WORDS, *pointers), (*sizes, *where, *header), tuning.warps)

    def encode(
        self, num_pages: int, tensors: Sequence[Tensor], handle: int | None, numbers: Sequence[int] = ()
    ) -> None:
        self._encode((self._tiles, num_pages, 1), tensors, handle, numbers)

    def decode(
        self, num_pages: int, tensors: Sequence[Tensor], handle: int | None, numbers: Sequence[int] = ()
    ) -> None:
        self._decode((self._tiles, num_pages, 1), tensors, handle, numbers)


class TritonFp8(TritonPages[Fp8Form]):
    """A `Coder` for devices with Triton."""

    def __init__(self, form: Fp8Form, tuning: Fp8Tuning = Fp8Tuning()) -> None:  # noqa: B008
        self._tuning = tuning
        raw = Pointer(1, _element(form))
        most: int = triton.next_power_of_2(form.rows)
        kernels = Fp8Kernels(form, tuning, (fp8_source.decode, fp8_source.encode), [raw], most)
        super().__init__(form, kernels, is_callable_compiled(fp8_source.decode))

    def paged(self, layers: Sequence[PagedLayer]) -> PagedCoder | None:
        alike = len({layer.form for layer in layers}) == 1
        return _in_cache(self._form, layers, self._tuning) if alike else None


def _in_cache(form: Fp8Form, layers: Sequence[PagedLayer], tuning: Fp8Tuning) -> PagesInCache:
    """For layers that are alike."""
    first = layers[0]
    places, alignment = cache_places(layers, first.k.element_size())
    # A tile is of one part.
    rows = form.rows // first.parts
    most: int = rows & -rows if first.parts > 1 else triton.next_power_of_2(rows)
    sources = fp8_source.decode_to_cache, fp8_source.encode_from_cache
    where = (*cache_constants(first, 1), alignment)
    kernels = Fp8Kernels(form, tuning, sources, [PLACES, SLOTS], most, where)
    return PagesInCache(kernels, places, first.num_rows, is_callable_compiled(fp8_source.decode_to_cache))


def _element(form: Fp8Form) -> torch.dtype:
    """Whole numbers as large as elements."""
    return torch.int32 if form.dtype == torch.float32 else torch.int16
