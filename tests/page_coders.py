"""What codes lossless pages: torch always, Triton where it is installed, interpreted on the host."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec

import pytest
from torch import Tensor

from lwkv.codecs.lossless_form import LosslessForm
from lwkv.codecs.page_codec import Coder
from lwkv.codecs.torch_lossless import TorchLossless
from lwkv.platforms import Platform

MakeCoder = Callable[[LosslessForm], Coder]


def interpret() -> None:
    """Have kernels run as Python on the host; for before Triton is imported the first time."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("triton was imported before: set TRITON_INTERPRET=1 to run its kernels on the host")
    os.environ["TRITON_INTERPRET"] = "1"


def coder_of(kind: str, platform: Platform) -> MakeCoder:
    if kind == "torch":
        return TorchLossless
    if platform.device_type == "cpu":
        interpret()
    elif not platform.features.triton:
        pytest.skip("triton does not serve this platform")
    from lwkv.codecs.triton.lossless import TritonLossless

    return TritonLossless


def encoded(coder: Coder, raw: Tensor) -> Tensor:
    """The coded pages of raw ones, uint8 [pages, bytes] both; all that is not written shows."""
    coded = raw.new_full((len(raw) * coder.page_bytes,), 0xA5)
    coder.encode(raw.flatten(), coded, len(raw))
    return coded.view(len(raw), -1)


def decoded(coder: Coder, coded: Tensor) -> Tensor:
    raw = coded.new_full((len(coded) * coder.raw_bytes,), 0x5A)
    coder.decode(coded.flatten(), raw, len(coded))
    return raw.view(len(coded), -1)
