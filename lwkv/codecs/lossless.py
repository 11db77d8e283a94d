"""Pages of bf16 in about 0.76 of their bytes, which come back bit for bit."""

from __future__ import annotations

import torch

from lwkv.codecs.coded_pages import CodedPages
from lwkv.codecs.lossless_form import VERSION, LosslessForm
from lwkv.layouts.paged_layer import PagedLayer


class LosslessPages(CodedPages[LosslessForm]):
    """The `PageCodec` of `lossless_form`, for layers in which `why_not` finds nothing."""

    name = "lossless"
    version = VERSION

    def _form(self, layer: PagedLayer) -> LosslessForm:
        return LosslessForm(self._rows(layer), layer.width)


def why_not(layer: PagedLayer) -> str | None:
    """Why pages of a layer cannot be coded losslessly, to follow its name; None if they can."""
    if layer.page_format != "canonical":
        return "is opaque: what its bytes are is not known"
    if layer.dtype != torch.bfloat16:
        return f"is {str(layer.dtype).removeprefix('torch.')}, and not bfloat16"
    return f"has heads of {layer.width} elements, which is an odd number" if layer.width % 2 else None
