"""Where the parts of a losslessly coded page are; docs/page-format.md describes them.

Everything is little-endian. A page has `rows` rows of `width` bf16 elements, 16 rows to a group; rows that
fill up the last group, or that a chunk lacks which is not full, are coded as zeros.

    header: "LWKVPAGE", then int32: version, rows, width, number of escapes; zeros up to 64 bytes
    starts: int32 a group, the number of escapes before it; then that of all, up to a multiple of 16 bytes
    tops:   uint8 a row, its largest exponent
    codes:  4 bits an element, the even one in the low bits: how far its exponent is below the row's top;
            14 for exponent 0, 15 for an escape
    signs:  uint8 an element: sign bit, then the seven bits of the mantissa
    escapes: uint8 for every code 15 in the order of the elements, its exponent; zeros up to the page's end

A page whose escapes do not all fit has their true number in its header, and is not to be decoded.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lwkv.codecs.page_codec import Flags
from lwkv.codecs.page_form import HEADER_BYTES, aligned

MAGIC = struct.unpack("<2i", b"LWKVPAGE")
VERSION = 1
GROUP = 16
ZERO, ESCAPE = 14, 15
FARTHEST = 13
ELEMENTS_PER_ESCAPE = 64
"""There is room for at least one escape in so many elements. In real models a few of 10,000 are escapes."""


@dataclass(frozen=True)
class LosslessForm:
    """The pages of `rows` rows of `width` bf16 elements, an even number. Offsets and sizes are in bytes."""

    rows: int
    width: int

    @property
    def raw_bytes(self) -> int:
        return 2 * self.rows * self.width

    @property
    def groups(self) -> int:
        return -(-self.rows // GROUP)

    @property
    def num_starts(self) -> int:
        return -(-(self.groups + 1) // 4) * 4

    @property
    def tops_at(self) -> int:
        return HEADER_BYTES + 4 * self.num_starts

    @property
    def codes_at(self) -> int:
        return self.tops_at + self.groups * GROUP

    @property
    def signs_at(self) -> int:
        return self.codes_at + self.groups * GROUP * self.width // 2

    @property
    def escapes_at(self) -> int:
        return self.signs_at + self.groups * GROUP * self.width

    @cached_property
    def page_bytes(self) -> int:
        return aligned(self.escapes_at + -(-self.rows * self.width // ELEMENTS_PER_ESCAPE))

    @property
    def capacity(self) -> int:
        """Escapes that there is room for."""
        return self.page_bytes - self.escapes_at

    @property
    def head_bytes(self) -> int:
        """Header and starts."""
        return self.tops_at

    def header(self, escapes: int) -> list[int]:
        """The int32 words of a header."""
        words = [*MAGIC, VERSION, self.rows, self.width, escapes]
        return words + [0] * (HEADER_BYTES // 4 - len(words))

    def fits(self, headers: npt.NDArray[np.uint8]) -> Flags:
        """As Coder's: the header is this form's, and there is room for the escapes."""
        words = np.ascontiguousarray(headers).view("<i4")
        escapes = words[:, 5]
        right = ((words == self._header) | self._is_count).all(axis=1)
        return np.asarray(right & (escapes >= 0) & (escapes <= self.capacity), bool)

    def whole(self, heads: npt.NDArray[np.uint8]) -> Flags:
        """As Coder's: besides, escapes are counted in order."""
        words = np.ascontiguousarray(heads).view("<i4")
        escapes, starts = words[:, 5], words[:, HEADER_BYTES // 4 :]
        right = self.fits(heads[:, :HEADER_BYTES]) & (starts[:, 0] == 0)
        # Without a sign, a step down is larger than any step up.
        steps = (starts[:, 1:] - starts[:, :-1]).view(np.uint32)
        right &= steps.max(axis=1) <= GROUP * self.width
        right &= (starts[:, self.groups :] == escapes[:, None]).all(axis=1)
        return np.asarray(right, bool)

    @cached_property
    def _header(self) -> npt.NDArray[np.int32]:
        return np.array(self.header(0), "<i4")

    @cached_property
    def _is_count(self) -> Flags:
        """Which word of a header is another in each page."""
        return np.asarray(np.arange(HEADER_BYTES // 4) == 5, bool)
