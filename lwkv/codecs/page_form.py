"""Where the parts of coded pages are, and what codecs have in common that follows from it."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from lwkv.codecs.page_codec import Flags

HEADER_BYTES = 64
PAGE_ALIGNMENT = 4096


class PageForm(Protocol):
    """The pages of `rows` rows of `width` elements; equal forms have equal hashes. Sizes are in bytes.

    `head_bytes`, `whole` and `fits` are as Coder's.
    """

    @property
    def rows(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def raw_bytes(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def head_bytes(self) -> int: ...

    def whole(self, heads: npt.NDArray[np.uint8]) -> Flags: ...

    def fits(self, headers: npt.NDArray[np.uint8]) -> Flags: ...

    def __hash__(self) -> int: ...


AForm = TypeVar("AForm", bound=PageForm)


class FormCoder(Generic[AForm]):
    """Of a `Coder`, the sizes and checks, which are its form's."""

    takes_handles: bool = False
    header_bytes = HEADER_BYTES

    def __init__(self, form: AForm) -> None:
        self._form = form
        self.raw_bytes, self.page_bytes, self.head_bytes = form.raw_bytes, form.page_bytes, form.head_bytes

    def whole(self, heads: npt.NDArray[np.uint8]) -> Flags:
        return self._form.whole(heads)

    def fits(self, headers: npt.NDArray[np.uint8]) -> Flags:
        return self._form.fits(headers)


def aligned(num_bytes: int) -> int:
    """Up to a multiple of 4096, as pages of host memory and of files are: neighbours are copied together."""
    return -(-num_bytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
