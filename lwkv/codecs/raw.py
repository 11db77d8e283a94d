"""Pages as kernels gather them."""

from __future__ import annotations

from lwkv.codecs.page_codec import Coder
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import Int64s


class RawPages:
    """The `PageCodec` that leaves pages as they are; chunks have `chunk_size` tokens."""

    name = "raw"
    is_coded = False

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size

    def page_kind(self, layer: PagedLayer) -> str:
        return layer.page_kind

    def page_bytes(self, layer: PagedLayer) -> int:
        return layer.page_bytes(self._chunk_size)

    def copied_bytes(self, layer: PagedLayer, chunk_tokens: Int64s) -> Int64s:
        return chunk_tokens * self.page_bytes(layer) // self._chunk_size

    def coder(self, layer: PagedLayer) -> Coder | None:
        return None
