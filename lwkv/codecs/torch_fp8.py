"""Pages of fp8 in plain torch: for every device, and the reference for the others.

Whole numbers only, so that all devices write the same bytes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lwkv.codecs.fp8_form import INFINITY, LARGEST, NAN, Fp8Form
from lwkv.codecs.torch_pages import TorchPages

_INFINITE, _NAN, _HALF_NAN = 0x7F800000, 0x7FC00000, 0x7E00
_HIDDEN, _MANTISSA, _MAGNITUDE = 0x800000, 0x7FFFFF, 0x7FFFFFFF


class TorchFp8(TorchPages[Fp8Form]):
    """A `Coder` for any device."""

    def _encode(self, raw: Tensor, coded: Tensor) -> None:
        form = self._form
        bits = _float32_bits(raw, form).view(len(raw), form.rows, form.width)
        tops = _tops(bits & _MAGNITUDE, form.largest_top)
        header = torch.from_numpy(form.header.view(np.uint8)).to(coded.device)
        coded[:, : form.tops_at] = header
        coded[:, form.tops_at : form.codes_at] = 0
        coded[:, form.tops_at : form.tops_at + form.rows] = tops[..., 0]
        coded[:, form.codes_at : form.codes_end] = _codes(bits, tops).view(len(raw), -1)
        coded[:, form.codes_end :] = 0

    def _decode(self, coded: Tensor, raw: Tensor) -> None:
        form = self._form
        tops = coded[:, form.tops_at : form.tops_at + form.rows].int()[..., None]
        codes = coded[:, form.codes_at : form.codes_end].int().view(len(coded), form.rows, form.width)
        _store(_values(codes, tops).view(len(coded), -1), raw, form)


def _float32_bits(raw: Tensor, form: Fp8Form) -> Tensor:
    """Elements of raw pages as float32 of the same value, int32."""
    if form.dtype == torch.bfloat16:
        return raw.view(torch.int16).int() << 16
    return raw.view(form.dtype).float().view(torch.int32)


def _tops(magnitudes: Tensor, largest_top: int) -> Tensor:
    """The exponent of each row's largest finite element, rounded to four significant bits; [..., 1]."""
    largest = magnitudes.masked_fill(magnitudes >= _INFINITE, 0).amax(2, keepdim=True)
    rounded = largest + 0x7FFFF + (largest >> 20 & 1)
    return (rounded >> 23).clamp_(max=largest_top)


def _codes(bits: Tensor, tops: Tensor) -> Tensor:
    magnitudes = bits & _MAGNITUDE
    below = tops - (magnitudes >> 23)
    # To the nearest, ties to even: 20 bits are cut off, and more below e4m3's smallest exponent.
    cut = (below - 13).clamp_(0, 5) + 20
    significand = magnitudes & _MANTISSA | _HIDDEN
    half = (torch.ones_like(cut) << cut - 1) - 1
    rounded = significand + half + (significand >> cut & 1) >> cut
    codes = (rounded + ((14 - below).clamp_(min=1) - 1 << 3)).clamp_(max=LARGEST)
    codes = codes.masked_fill_(magnitudes < _HIDDEN, 0).masked_fill_(magnitudes == _INFINITE, INFINITY)
    return (codes | bits >> 24 & 0x80).masked_fill_(magnitudes > _INFINITE, NAN)


def _values(codes: Tensor, tops: Tensor) -> Tensor:
    """The float32 bits of what is coded; of what would be a denormal, zero."""
    magnitudes = codes & 0x7F
    exponents = magnitudes >> 3
    significand = magnitudes & 7 | (exponents > 0).int() << 3
    as_float = significand.float().view(torch.int32)
    total = (as_float >> 23) + exponents.clamp(min=1) + tops - 144
    values = as_float & _MANTISSA | total.clamp(0, 254) << 23
    values = values.masked_fill_((total <= 0) | (significand == 0), 0)
    values = values.masked_fill_(magnitudes == INFINITY, _INFINITE)
    return (values | (codes & 0x80) << 24).masked_fill_(magnitudes > INFINITY, _NAN)


def _store(values: Tensor, raw: Tensor, form: Fp8Form) -> None:
    """Write float32 bits to raw pages as elements of their dtype."""
    if form.dtype == torch.bfloat16:
        raw.view(torch.int16).copy_(values >> 16)
    elif form.dtype == torch.float32:
        raw.view(torch.int32).copy_(values)
    else:
        halves = values.view(torch.float32).half().view(torch.int16)
        # Devices turn NaN into different NaNs.
        raw.view(torch.int16).copy_(halves.masked_fill_(values == _NAN, _HALF_NAN))
