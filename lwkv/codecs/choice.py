"""Which codec serves an engine's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from lwkv.codecs.lossless import LosslessPages, why_not
from lwkv.codecs.lossless_form import LosslessForm
from lwkv.codecs.page_codec import Coder, PageCodec
from lwkv.codecs.raw import RawPages
from lwkv.codecs.torch_lossless import TorchLossless
from lwkv.errors import ConfigError
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import Platform

_WHY_LOSSLESS = "page_codec=auto: as fast as raw here or faster, and every bit comes back"


class Choice(NamedTuple):
    """The codec of an engine's layers, and why it is this one: words to follow its name."""

    codec: PageCodec
    why: str


def choose_codec(
    asked: Literal["auto", "raw", "lossless"],
    platform: Platform,
    layers: Sequence[PagedLayer],
    chunk_size: int,
    against: Callable[[PageCodec], str | None] = lambda codec: None,
) -> Choice:
    """The codec of `page_codec=asked`, one for all layers; "auto" is raw where lossless is not known to pay.

    Args:
        against: what speaks against a codec where these layers are used; None if nothing does. For "auto".

    Raises:
        ConfigError: "lossless" with a layer that it does not serve.
    """
    raw, lossless = RawPages(chunk_size), LosslessPages(chunk_size, coders_for(platform))
    if asked == "raw":
        return Choice(raw, "page_codec=raw")
    refused = next(((layer.name, reason) for layer in layers if (reason := why_not(layer))), None)
    if asked == "auto":
        reason = _why_raw(platform, layers, raw, lossless, refused) or against(lossless)
        return Choice(raw, f"page_codec=auto: {reason}") if reason else Choice(lossless, _WHY_LOSSLESS)
    if refused:
        name, reason = refused
        raise ConfigError(
            f"page_codec=lossless: layer {name!r} {reason}; set page_codec to auto or raw, "
            "or register bfloat16 caches whose K and V can be addressed"
        )
    return Choice(lossless, "page_codec=lossless")


def _why_raw(
    platform: Platform,
    layers: Sequence[PagedLayer],
    raw: RawPages,
    lossless: LosslessPages,
    refused: tuple[str, str] | None,
) -> str | None:
    """Why these layers stay raw of themselves; None if lossless pages of them are known to pay."""
    if not platform.features.lossless_pages:
        return "lossless was not measured to be as fast here"
    if refused:
        name, reason = refused
        return f"layer {name!r} {reason}"
    grown = (layer for layer in layers if lossless.page_bytes(layer) >= raw.page_bytes(layer))
    largest = next(grown, None)
    return None if largest is None else f"lossless pages of layer {largest.name!r} would not be smaller"


def coders_for(platform: Platform) -> Callable[[LosslessForm], Coder]:
    """Makes what codes pages of a form: in Triton where the platform's features have it, else in torch."""
    if not platform.features.triton:
        return TorchLossless
    from lwkv.codecs.triton.lossless import TritonLossless

    return TritonLossless
