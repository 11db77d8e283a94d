"""Pages in tensors, for codecs in plain torch."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

# What is worked on at a time: each takes some 40 bytes meanwhile.
MOST_ELEMENTS = 1 << 22


class Sizes(Protocol):
    """Sizes of pages, raw and coded."""

    @property
    def rows(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def raw_bytes(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...


def pairs(form: Sizes, raw: Tensor, coded: Tensor, num_pages: int) -> list[tuple[Tensor, Tensor]]:
    """The same pages of both, [pages, bytes] each, some at a time."""
    most = max(1, MOST_ELEMENTS // (form.rows * form.width))
    raw_pages = raw[: num_pages * form.raw_bytes].view(num_pages, form.raw_bytes)
    coded_pages = coded[: num_pages * form.page_bytes].view(num_pages, form.page_bytes)
    parts = [slice(start, start + most) for start in range(0, num_pages, most)]
    return [(raw_pages[part], coded_pages[part]) for part in parts]
