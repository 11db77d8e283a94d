"""What a page codec offers.

Between host memory and the engine's blocks a page has two forms. The *raw* page is packed rows, as
`PagedLayer` describes them; kernels scatter from raw pages and gather into them. The *coded* page is what
host memory, lower tiers and staging hold. A codec decodes coded pages into raw ones after the copy to the
device, and codes raw ones before the copy to the host. Where both are the same, nothing is done.

Codecs know pages only, neither layouts nor slots: so they are the same for every layout, for whole chunks and
parts of chunks, for keys that turn on their way and keys that do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import Int64s

Flags = npt.NDArray[np.bool_]


class Coder(Protocol):
    """Codes and decodes the pages of one form, on the current stream or that of a `handle`, as `Kernels`.

    Nothing here waits for the device or reads it back. Both kinds of pages lie one behind the other from the
    start of a uint8 tensor (bytes,) on the device, which is contiguous and begins at a multiple of 16 bytes.
    The tensors must live until the queued work is done.

    Attributes:
        raw_bytes, page_bytes: of a raw and of a coded page.
        head_bytes: at the beginning of a coded page, what `whole` looks at.
        header_bytes: of these the first, what `fits` looks at.
    """

    takes_handles: bool
    raw_bytes: int
    page_bytes: int
    head_bytes: int
    header_bytes: int

    def encode(self, raw: Tensor, coded: Tensor, num_pages: int, handle: int | None = None) -> None:
        """Write coded pages; the same raw bytes give the same coded bytes on every device."""

    def decode(self, coded: Tensor, raw: Tensor, num_pages: int, handle: int | None = None) -> None:
        """Write raw pages. Whatever the coded bytes are, nothing else is written or read than these pages."""

    def paged(self, layers: Sequence[PagedLayer]) -> PagedCoder | None:
        """What codes pages of these layers without raw pages in between; None where nothing does."""

    def whole(self, heads: npt.NDArray[np.uint8]) -> Flags:
        """Which pages can be decoded, bool (pages,), by their first bytes, uint8 (pages, head_bytes), on the
        host: False for one that the codec could not code, and for one that is no page of this form."""

    def fits(self, headers: npt.NDArray[np.uint8]) -> Flags:
        """The same of pages that `encode` has just written, where the rest need not be looked at, by their
        headers alone, uint8 (pages, header_bytes)."""


class PagedCoder(Protocol):
    """Codes pages of full chunks from where an engine keeps their rows, and decodes them to there.

    For the layers that it was made for. The rest is as with `Coder`.

    Args of both methods:
        layers: neighbours among those layers; all pages of the first come first, in `coded`.
        slots: int64 (num_pages * tokens of a chunk,), on the device: the row of each token in the cache. Rows
            that do not exist are coded as zeros, and not written.
        num_pages: of each layer.
    """

    takes_handles: bool

    def encode(
        self,
        layers: Sequence[PagedLayer],
        slots: Tensor,
        coded: Tensor,
        num_pages: int,
        handle: int | None = None,
    ) -> None:
        """Write coded pages: those that `Coder` makes of the raw ones."""

    def decode(
        self,
        layers: Sequence[PagedLayer],
        slots: Tensor,
        coded: Tensor,
        num_pages: int,
        handle: int | None = None,
    ) -> None:
        """Write these slots of the cache. Whatever the coded bytes are, nothing else is written."""


class Coding(NamedTuple):
    """What is to be coded or decoded of one staging buffer.

    `has_gaps`: some pages are of chunks that are not full: the ends of their raw pages are not written.
    """

    coder: Coder
    num_pages: int
    has_gaps: bool


class PageCodec(Protocol):
    """One kind of pages, for layers that it was made for.

    Attributes:
        name: what users call it.
        is_coded: whether its pages are coded: `coder` is never None then, and always otherwise.
    """

    name: str
    is_coded: bool

    def page_kind(self, layer: PagedLayer) -> str:
        """What the bytes of a layer's pages are, in words that enter every key."""

    def page_bytes(self, layer: PagedLayer) -> int:
        """Bytes of the page of a full chunk, in host memory and wherever else it is kept."""

    def copied_bytes(self, layer: PagedLayer, chunk_tokens: Int64s) -> Int64s:
        """Bytes of the page of a chunk with so many tokens, int64 (chunks,)."""

    def coder(self, layer: PagedLayer) -> Coder | None:
        """What codes pages of this layer, the same object for layers of one form; None if they are raw."""
