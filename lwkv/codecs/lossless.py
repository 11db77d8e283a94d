"""Pages of bf16 in about 0.76 of their bytes, which come back bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from lwkv.codecs.lossless_form import VERSION, LosslessForm
from lwkv.codecs.page_codec import Coder
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import Int64s


class LosslessPages:
    """The `PageCodec` of `lossless_form`, for layers in which `why_not` finds nothing.

    Args:
        make_coder: makes what codes pages of a form.
    """

    name = "lossless"
    is_coded = True

    def __init__(self, chunk_size: int, make_coder: Callable[[LosslessForm], Coder]) -> None:
        self._chunk_size = chunk_size
        self._make_coder = make_coder
        self._coders: dict[LosslessForm, Coder] = {}

    def page_kind(self, layer: PagedLayer) -> str:
        return f"lossless-{VERSION}:bfloat16:{layer.parts}x{layer.heads}x{layer.width}"

    def page_bytes(self, layer: PagedLayer) -> int:
        return self._form(layer).page_bytes

    def copied_bytes(self, layer: PagedLayer, chunk_tokens: Int64s) -> Int64s:
        return np.full(len(chunk_tokens), self.page_bytes(layer))

    def coder(self, layer: PagedLayer) -> Coder:
        form = self._form(layer)
        if form not in self._coders:
            self._coders[form] = self._make_coder(form)
        return self._coders[form]

    def _form(self, layer: PagedLayer) -> LosslessForm:
        return LosslessForm(layer.parts * self._chunk_size * layer.heads, layer.width)


def why_not(layer: PagedLayer) -> str | None:
    """Why pages of a layer cannot be coded losslessly, to follow its name; None if they can."""
    if layer.page_format != "canonical":
        return "is opaque: what its bytes are is not known"
    if layer.dtype != torch.bfloat16:
        return f"is {str(layer.dtype).removeprefix('torch.')}, and not bfloat16"
    return f"has heads of {layer.width} elements, which is an odd number" if layer.width % 2 else None
