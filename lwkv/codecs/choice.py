"""Which codec serves an engine's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from lwkv.codecs import fp8, lossless
from lwkv.codecs.fp8 import Fp8Pages
from lwkv.codecs.fp8_form import Fp8Form
from lwkv.codecs.lossless import LosslessPages
from lwkv.codecs.lossless_form import LosslessForm
from lwkv.codecs.page_codec import Coder, PageCodec
from lwkv.codecs.raw import RawPages
from lwkv.codecs.torch_fp8 import TorchFp8
from lwkv.codecs.torch_lossless import TorchLossless
from lwkv.errors import ConfigError
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import Platform

_WHY_LOSSLESS = "page_codec=auto: as fast as raw here or faster, and every bit comes back"
_WHY_FP8 = "page_codec=fp8: LOSSY, loaded values are rounded to 4 significant bits or fewer"


class CodecChoice(NamedTuple):
    """The codec of an engine's layers, and why it is this one: words to follow its name."""

    codec: PageCodec
    why: str


def choose_codec(
    asked: Literal["auto", "raw", "lossless", "fp8"],
    platform: Platform,
    layers: Sequence[PagedLayer],
    chunk_size: int,
    against: Callable[[PageCodec], str | None] = lambda codec: None,
) -> CodecChoice:
    """The codec of `page_codec=asked`, one for all layers; "auto" is raw where lossless is not known to pay.

    Args:
        against: what speaks against a codec where these layers are used; None if nothing does. For "auto".

    Raises:
        ConfigError: "lossless" or "fp8" with a layer that it does not serve.
    """
    if asked == "raw":
        return CodecChoice(RawPages(chunk_size), "page_codec=raw")
    if asked == "fp8":
        _require(asked, layers, fp8.why_not, "bfloat16, float16 or float32 caches")
        return CodecChoice(Fp8Pages(chunk_size, fp8_coders_for(platform)), _WHY_FP8)
    raw, lossless_pages = RawPages(chunk_size), LosslessPages(chunk_size, coders_for(platform))
    if asked == "auto":
        reason = _why_raw(platform, layers, raw, lossless_pages) or against(lossless_pages)
        if reason:
            return CodecChoice(raw, f"page_codec=auto: {reason}")
        return CodecChoice(lossless_pages, _WHY_LOSSLESS)
    _require(asked, layers, lossless.why_not, "bfloat16 caches")
    return CodecChoice(lossless_pages, "page_codec=lossless")


def _why_raw(
    platform: Platform, layers: Sequence[PagedLayer], raw: RawPages, coded: LosslessPages
) -> str | None:
    """Why these layers stay raw of themselves; None if lossless pages of them are known to pay."""
    if not platform.features.lossless_pages:
        return "lossless was not measured to be as fast here"
    refused = _find_refused(layers, lossless.why_not)
    if refused is not None:
        return refused
    grown = (layer for layer in layers if coded.page_bytes(layer) >= raw.page_bytes(layer))
    largest = next(grown, None)
    return None if largest is None else f"lossless pages of layer {largest.name!r} would not be smaller"


def _require(
    asked: str, layers: Sequence[PagedLayer], why_not: Callable[[PagedLayer], str | None], served: str
) -> None:
    refused = _find_refused(layers, why_not)
    if refused is not None:
        raise ConfigError(
            f"page_codec={asked}: {refused}; set page_codec to auto or raw, "
            f"or register {served} whose K and V can be addressed"
        )


def _find_refused(layers: Sequence[PagedLayer], why_not: Callable[[PagedLayer], str | None]) -> str | None:
    """The first layer that a codec does not serve, and why."""
    found = ((layer.name, reason) for layer in layers if (reason := why_not(layer)))
    return next((f"layer {name!r} {reason}" for name, reason in found), None)


def coders_for(platform: Platform) -> Callable[[LosslessForm], Coder]:
    """Makes what codes lossless pages of a form: in Triton where the platform has it, else in torch."""
    if not platform.features.triton:
        return TorchLossless
    from lwkv.codecs.triton.lossless import TritonLossless

    return TritonLossless


def fp8_coders_for(platform: Platform) -> Callable[[Fp8Form], Coder]:
    """As `coders_for`, for pages of fp8."""
    if not platform.features.triton:
        return TorchFp8
    from lwkv.codecs.triton.fp8 import TritonFp8

    return TritonFp8
