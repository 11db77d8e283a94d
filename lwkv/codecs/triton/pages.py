"""Coded pages in Triton, whatever kernels a codec has: raw ones, and rows in an engine's caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from lwkv.codecs.page_form import AForm, FormCoder
from lwkv.layouts.paged_layer import PagedLayer


class PageKernels(Protocol):
    """The kernels of one form of pages, which differ in where rows are when they are not coded.

    Args of both methods:
        num_pages: of all layers together.
        tensors: the coded pages, and what else the kernels take.
        numbers: of the kernels, too; others for each call.
    """

    def encode(
        self, num_pages: int, tensors: Sequence[Tensor], handle: int | None, numbers: Sequence[int] = ()
    ) -> None:
        """Queue what codes pages."""

    def decode(
        self, num_pages: int, tensors: Sequence[Tensor], handle: int | None, numbers: Sequence[int] = ()
    ) -> None:
        """Queue what decodes pages."""


class TritonPages(FormCoder[AForm]):
    """A `Coder` for devices with Triton, but for `paged`. The first calls compile, for about a second."""

    def __init__(self, form: AForm, kernels: PageKernels, takes_handles: bool) -> None:
        super().__init__(form)
        self._kernels, self.takes_handles = kernels, takes_handles

    def encode(self, raw: Tensor, coded: Tensor, num_pages: int, handle: int | None = None) -> None:
        self._kernels.encode(num_pages, (coded, raw), handle)

    def decode(self, coded: Tensor, raw: Tensor, num_pages: int, handle: int | None = None) -> None:
        self._kernels.decode(num_pages, (coded, raw), handle)


class PagesInCache:
    """A `PagedCoder` for devices with Triton.

    Args:
        places: as `cache_places` has them.
        cache_rows: slots of a layer.
    """

    def __init__(
        self,
        kernels: PageKernels,
        places: Mapping[PagedLayer, Tensor],
        cache_rows: int,
        takes_handles: bool,
    ) -> None:
        self._kernels, self._places, self._cache_rows = kernels, places, cache_rows
        self.takes_handles = takes_handles

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
