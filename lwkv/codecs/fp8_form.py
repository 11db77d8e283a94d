"""Where the parts of a page of fp8 are; docs/page-format.md describes them.

Everything is little-endian. A page has `rows` rows of `width` elements; rows that a chunk lacks which is not
full are coded as zeros.

    header: "LWKVFP8P", then int32: version, rows, width, kind of the elements; zeros up to 64 bytes
    tops:   uint8 a row: the float32 exponent of its largest finite element, which is rounded to four
            significant bits before; zeros up to a multiple of 16 bytes
    codes:  uint8 an element, e4m3: sign, four bits of exponent, three of mantissa, denormals as usual; times
            2 ** (top - 134), so that the largest has exponent 14. 0x78 is infinity, 0x7F is NaN
    zeros up to the page's end
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from lwkv.codecs.page_codec import Flags
from lwkv.codecs.page_form import HEADER_BYTES, aligned

MAGIC = struct.unpack("<2i", b"LWKVFP8P")
VERSION = 1
KINDS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
TOPS_ALIGNMENT = 16
INFINITY, NAN, LARGEST = 0x78, 0x7F, 0x77
"""Codes without a sign; the largest of a number."""


@dataclass(frozen=True)
class Fp8Form:
    """The pages of `rows` rows of `width` elements of a `dtype` of KINDS. Offsets and sizes are in bytes."""

    rows: int
    width: int
    dtype: torch.dtype

    @property
    def raw_bytes(self) -> int:
        return self.rows * self.width * self.dtype.itemsize

    @property
    def tops_at(self) -> int:
        return HEADER_BYTES

    @property
    def codes_at(self) -> int:
        return self.tops_at + -(-self.rows // TOPS_ALIGNMENT) * TOPS_ALIGNMENT

    @property
    def codes_end(self) -> int:
        return self.codes_at + self.rows * self.width

    @cached_property
    def page_bytes(self) -> int:
        return aligned(self.codes_end)

    @property
    def head_bytes(self) -> int:
        """The header: see `fits`."""
        return HEADER_BYTES

    @property
    def kind(self) -> int:
        return KINDS[self.dtype]

    @property
    def largest_top(self) -> int:
        """The float32 exponent of the dtype's largest number."""
        return 127 + 15 if self.dtype == torch.float16 else 254

    @cached_property
    def header(self) -> npt.NDArray[np.int32]:
        words = np.zeros(HEADER_BYTES // 4, "<i4")
        words[:6] = *MAGIC, VERSION, self.rows, self.width, self.kind
        return words

    def fits(self, headers: npt.NDArray[np.uint8]) -> Flags:
        """As Coder's: the header is this form's."""
        words = np.ascontiguousarray(headers).view("<i4")
        return np.asarray((words == self.header).all(axis=1), bool)

    def whole(self, heads: npt.NDArray[np.uint8]) -> Flags:
        """As Coder's: any bytes behind the header can be decoded."""
        return self.fits(heads)
