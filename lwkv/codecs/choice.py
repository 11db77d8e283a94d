"""Which codec serves an engine's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from lwkv.codecs.lossless import LosslessPages, why_not
from lwkv.codecs.lossless_form import LosslessForm
from lwkv.codecs.page_codec import Coder, PageCodec
from lwkv.codecs.raw import RawPages
from lwkv.codecs.torch_lossless import TorchLossless
from lwkv.errors import ConfigError
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import Platform


def choose_codec(
    asked: Literal["auto", "raw", "lossless"],
    platform: Platform,
    layers: Sequence[PagedLayer],
    chunk_size: int,
) -> PageCodec:
    """The codec of `page_codec=asked`, one for all layers; "auto" is raw where lossless is not known to pay.

    Raises:
        ConfigError: "lossless" with a layer that it does not serve.
    """
    raw, lossless = RawPages(chunk_size), LosslessPages(chunk_size, coders_for(platform))
    refused = next(((layer.name, reason) for layer in layers if (reason := why_not(layer))), None)
    if asked == "lossless" and refused:
        name, reason = refused
        raise ConfigError(
            f"page_codec=lossless: layer {name!r} {reason}; set page_codec to auto or raw, "
            "or register bfloat16 caches whose K and V can be addressed"
        )
    pays = platform.features.lossless_pages and not refused
    smaller = pays and all(lossless.page_bytes(layer) < raw.page_bytes(layer) for layer in layers)
    return lossless if asked == "lossless" or (asked == "auto" and smaller) else raw


def coders_for(platform: Platform) -> Callable[[LosslessForm], Coder]:
    """Makes what codes pages of a form: in Triton where the platform's features have it, else in torch."""
    if not platform.features.triton:
        return TorchLossless
    from lwkv.codecs.triton.lossless import TritonLossless

    return TritonLossless
