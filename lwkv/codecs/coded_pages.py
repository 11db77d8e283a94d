"""What codecs have in common whose pages have one size, whatever is in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

import numpy as np

from lwkv.codecs.page_codec import Coder
from lwkv.codecs.page_form import AForm
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import Int64s


class CodedPages(Generic[AForm]):
    """A `PageCodec` whose pages all are of one form, for layers that it serves.

    Args:
        make_coder: makes what codes pages of a form.
    """

    name: str
    version: int
    is_coded = True

    def __init__(self, chunk_size: int, make_coder: Callable[[AForm], Coder]) -> None:
        self._chunk_size = chunk_size
        self._make_coder = make_coder
        self._coders: dict[AForm, Coder] = {}

    def page_kind(self, layer: PagedLayer) -> str:
        dtype = str(layer.dtype).removeprefix("torch.")
        return f"{self.name}-{self.version}:{dtype}:{layer.parts}x{layer.heads}x{layer.width}"

    def page_bytes(self, layer: PagedLayer) -> int:
        return self._form(layer).page_bytes

    def copied_bytes(self, layer: PagedLayer, chunk_tokens: Int64s) -> Int64s:
        return np.full(len(chunk_tokens), self.page_bytes(layer))

    def coder(self, layer: PagedLayer) -> Coder:
        form = self._form(layer)
        if form not in self._coders:
            self._coders[form] = self._make_coder(form)
        return self._coders[form]

    def _rows(self, layer: PagedLayer) -> int:
        """Of the page of a full chunk."""
        return layer.parts * self._chunk_size * layer.heads

    def _form(self, layer: PagedLayer) -> AForm:
        raise NotImplementedError
