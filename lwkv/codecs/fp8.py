"""Pages of floats in one byte an element: they keep four significant bits, small ones fewer."""

from __future__ import annotations

from lwkv.codecs.coded_pages import CodedPages
from lwkv.codecs.fp8_form import KINDS, VERSION, Fp8Form
from lwkv.layouts.paged_layer import PagedLayer


class Fp8Pages(CodedPages[Fp8Form]):
    """The `PageCodec` of `fp8_form`, for layers in which `why_not` finds nothing. It changes values."""

    name = "fp8"
    version = VERSION

    def _form(self, layer: PagedLayer) -> Fp8Form:
        return Fp8Form(self._rows(layer), layer.width, layer.dtype)


def why_not(layer: PagedLayer) -> str | None:
    """Why pages of a layer cannot be kept as fp8, to follow its name; None if they can."""
    if layer.page_format != "canonical":
        return "is opaque: what its bytes are is not known"
    if layer.dtype not in KINDS:
        return f"is {str(layer.dtype).removeprefix('torch.')}, and not bfloat16, float16 or float32"
    return None
