"""What codes pages, lossless and fp8: torch always, Triton where it is installed, interpreted on the host."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from lwkv.codecs.page_codec import Coder
from lwkv.codecs.torch_fp8 import TorchFp8
from lwkv.codecs.torch_lossless import TorchLossless
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import Platform

MakeCoder = Callable[[Any], Coder]
"""Of a LosslessForm, or of an Fp8Form."""
IN_TORCH: dict[str, MakeCoder] = {"lossless": TorchLossless, "fp8": TorchFp8}


def interpret() -> None:
    """Have kernels run as Python on the host; for before Triton is imported the first time."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("triton was imported before: set TRITON_INTERPRET=1 to run its kernels on the host")
    os.environ["TRITON_INTERPRET"] = "1"


def coder_of(kind: str, platform: Platform, codec: str = "lossless") -> MakeCoder:
    if kind == "torch":
        return IN_TORCH[codec]
    if platform.device_type == "cpu":
        interpret()
    elif not platform.features.triton:
        pytest.skip("triton does not serve this platform")
    from lwkv.codecs.triton.fp8 import TritonFp8
    from lwkv.codecs.triton.lossless import TritonLossless

    return TritonLossless if codec == "lossless" else TritonFp8


def encoded(coder: Coder, raw: Tensor) -> Tensor:
    """The coded pages of raw ones, uint8 [pages, bytes] both; all that is not written shows."""
    coded = raw.new_full((len(raw) * coder.page_bytes,), 0xA5)
    coder.encode(raw.flatten(), coded, len(raw))
    return coded.view(len(raw), -1)


def decoded(coder: Coder, coded: Tensor) -> Tensor:
    raw = coded.new_full((len(coded) * coder.raw_bytes,), 0x5A)
    coder.decode(coded.flatten(), raw, len(coded))
    return raw.view(len(coded), -1)


class TorchPaged:
    """A `PagedCoder` in plain torch, which counts what it is asked for: by way of raw pages of its own."""

    takes_handles = False

    def __init__(self, coder: TorchLossless, layers: Sequence[PagedLayer]) -> None:
        self._coder = coder
        self.encoded = self.decoded = 0

    @torch.inference_mode()
    def encode(
        self,
        layers: Sequence[PagedLayer],
        slots: Tensor,
        coded: Tensor,
        num_pages: int,
        handle: int | None = None,
    ) -> None:
        self.encoded += len(layers)
        size = num_pages * self._coder.page_bytes
        for number, layer in enumerate(layers):
            there = (slots >= 0) & (slots < layer.num_rows)
            rows = [_rows(view)[slots.where(there, 0)] * there[:, None] for view in _views(layer)]
            raw = [part.view(num_pages, -1) for part in rows]
            pages = torch.cat(raw, 1).flatten().view(torch.uint8)
            self._coder.encode(pages, coded[number * size : (number + 1) * size], num_pages)

    @torch.inference_mode()
    def decode(
        self,
        layers: Sequence[PagedLayer],
        slots: Tensor,
        coded: Tensor,
        num_pages: int,
        handle: int | None = None,
    ) -> None:
        self.decoded += len(layers)
        size = num_pages * self._coder.page_bytes
        for number, layer in enumerate(layers):
            raw = coded.new_empty(num_pages * self._coder.raw_bytes)
            self._coder.decode(coded[number * size : (number + 1) * size], raw, num_pages)
            parts = raw.view(torch.int16).view(num_pages, layer.parts, -1).unbind(1)
            there = (slots >= 0) & (slots < layer.num_rows)
            block, offset = (n[there] for n in (slots // layer.k.shape[1], slots % layer.k.shape[1]))
            for view, part in zip(_views(layer), parts, strict=True):
                view[block, offset] = part.reshape(len(slots), *view.shape[2:])[there]


def _views(layer: PagedLayer) -> list[Tensor]:
    return [view for view in (layer.k, layer.v) if view is not None]


def _rows(view: Tensor) -> Tensor:
    return view.reshape(view.shape[0] * view.shape[1], -1)
