"""Page codecs: what the bytes of a page are in host memory and below, and what makes them on the device."""

from __future__ import annotations

from lwkv.codecs.choice import choose_codec
from lwkv.codecs.page_check import PageCheck
from lwkv.codecs.page_codec import Coder, Coding, PageCodec, PagedCoder
from lwkv.codecs.raw import RawPages

__all__ = ["Coder", "Coding", "PageCheck", "PageCodec", "PagedCoder", "RawPages", "choose_codec"]
