"""Coded pages in plain torch: for every device, and the reference for the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lwkv.codecs.page_codec import PagedCoder
from lwkv.codecs.page_form import AForm, FormCoder
from lwkv.layouts.paged_layer import PagedLayer

# What is worked on at a time: each takes some 40 bytes meanwhile.
MOST_ELEMENTS = 1 << 22


class TorchPages(FormCoder[AForm]):
    """A `Coder` for any device, but for what one page is made of. In inference mode, as the kernels are."""

    @torch.inference_mode()
    def encode(self, raw: Tensor, coded: Tensor, num_pages: int, handle: int | None = None) -> None:
        for source, target in self._pairs(raw, coded, num_pages):
            self._encode(source, target)

    @torch.inference_mode()
    def decode(self, coded: Tensor, raw: Tensor, num_pages: int, handle: int | None = None) -> None:
        for target, source in self._pairs(raw, coded, num_pages):
            self._decode(source, target)

    def paged(self, layers: Sequence[PagedLayer]) -> PagedCoder | None:
        return None

    def _encode(self, raw: Tensor, coded: Tensor) -> None:
        """Write coded pages, uint8 [pages, page_bytes], of raw ones, uint8 [pages, raw_bytes]."""
        raise NotImplementedError

    def _decode(self, coded: Tensor, raw: Tensor) -> None:
        """The opposite."""
        raise NotImplementedError

    def _pairs(self, raw: Tensor, coded: Tensor, num_pages: int) -> list[tuple[Tensor, Tensor]]:
        """The same pages of both, [pages, bytes] each, some at a time."""
        most = max(1, MOST_ELEMENTS // (self._form.rows * self._form.width))
        raw_pages = raw[: num_pages * self.raw_bytes].view(num_pages, self.raw_bytes)
        coded_pages = coded[: num_pages * self.page_bytes].view(num_pages, self.page_bytes)
        parts = [slice(start, start + most) for start in range(0, num_pages, most)]
        return [(raw_pages[part], coded_pages[part]) for part in parts]
