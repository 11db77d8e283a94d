"""Pages of fp8 in Triton: one launch decodes pages, one codes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from lwkv.codecs.fp8_form import HEADER_BYTES, MAGIC, VERSION, Fp8Form
from lwkv.codecs.page_codec import Flags, PagedCoder
from lwkv.codecs.triton import fp8_source
from lwkv.codecs.triton.launch import Kernel, Pointer
from lwkv.codecs.triton.places import PLACES, SLOTS, cache_places
from lwkv.kernels.triton.launch import is_callable_compiled
from lwkv.layouts.paged_layer import PagedLayer

BLOCK = 1024
CODED, WORDS = Pointer(0, torch.uint8), Pointer(0, torch.int32)


class Tuning(NamedTuple):
    """Elements that a program works on at once, a power of two, and its warps."""

    elements: int = 2048
    warps: int = 4


class Kernels:
    """The kernels of one form of pages, which differ in where rows are when they are not coded.

    Args:
        decode, encode: see `lwkv.codecs.triton.fp8_source`.
        pointers: what these take besides the coded pages.
        most_rows: of a tile at most, a power of two.
        where: further constants.
    """

    def __init__(
        self,
        form: Fp8Form,
        tuning: Tuning,
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
        """Queue what codes so many pages, all layers together; `tensors` begin with the coded ones."""
        self._encode((self._tiles, num_pages, 1), tensors, handle, numbers)

    def decode(
        self, num_pages: int, tensors: Sequence[Tensor], handle: int | None, numbers: Sequence[int] = ()
    ) -> None:
        """Queue what decodes so many pages."""
        self._decode((self._tiles, num_pages, 1), tensors, handle, numbers)


class TritonFp8:
    """A `Coder` for devices with Triton. The first calls compile, for about a second."""

    def __init__(self, form: Fp8Form, tuning: Tuning = Tuning()) -> None:  # noqa: B008
        self._form, self._tuning = form, tuning
        self.raw_bytes, self.page_bytes = form.raw_bytes, form.page_bytes
        self.head_bytes = self.header_bytes = HEADER_BYTES
        self.takes_handles = is_callable_compiled(fp8_source.decode)
        raw = Pointer(1, _element(form))
        most: int = triton.next_power_of_2(form.rows)
        self._kernels = Kernels(form, tuning, (fp8_source.decode, fp8_source.encode), [raw], most)

    def paged(self, layers: Sequence[PagedLayer]) -> PagedCoder | None:
        alike = len({layer.form for layer in layers}) == 1
        return PagedFp8(self._form, layers, self._tuning) if alike else None

    def encode(self, raw: Tensor, coded: Tensor, num_pages: int, handle: int | None = None) -> None:
        self._kernels.encode(num_pages, (coded, raw), handle)

    def decode(self, coded: Tensor, raw: Tensor, num_pages: int, handle: int | None = None) -> None:
        self._kernels.decode(num_pages, (coded, raw), handle)

    def whole(self, heads: npt.NDArray[np.uint8]) -> Flags:
        return self._form.fits(heads)

    def fits(self, headers: npt.NDArray[np.uint8]) -> Flags:
        return self._form.fits(headers)


class PagedFp8:
    """A `PagedCoder` for devices with Triton; `layers` are alike."""

    def __init__(self, form: Fp8Form, layers: Sequence[PagedLayer], tuning: Tuning) -> None:
        first = layers[0]
        self.takes_handles = is_callable_compiled(fp8_source.decode_to_cache)
        self._places, alignment = cache_places(layers, first.k.element_size())
        self._cache_rows = first.num_rows
        # A tile is of one part.
        rows = form.rows // first.parts
        most: int = rows & -rows if first.parts > 1 else triton.next_power_of_2(rows)
        block, token, head, _ = first.k.stride()
        where = first.parts, first.heads, first.k.shape[1], block, token, head, alignment
        kernels = fp8_source.decode_to_cache, fp8_source.encode_from_cache
        self._kernels = Kernels(form, tuning, kernels, [PLACES, SLOTS], most, where)

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


def _element(form: Fp8Form) -> torch.dtype:
    """Whole numbers as large as elements."""
    return torch.int32 if form.dtype == torch.float32 else torch.int16
