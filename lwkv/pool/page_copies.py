"""The copies of several layers of the same chunks, worked out together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lwkv.platforms import CopyBatch
from lwkv.platforms.protocol import Int64s

_AT_THE_START = np.zeros(1, np.int64)


class Slabs(NamedTuple):
    """Memory that pages lie in: slab by slab, `span` pages in each, `page_stride` bytes from one to the next.

    `bases` is int64 (slabs,), the address of each.
    """

    memory: Sequence[torch.Tensor]
    bases: Int64s
    span: int
    page_stride: int


class PageCopies:
    """The copies of pages to or from buffers, several layers together where they share one.

    A batch has the first `sizes[i]` bytes of page `pages[j, i]`, for every layer j of it, at
    `(j - first) * chunks * device_stride + i * device_stride` of the buffer. Neighbouring full pages of a
    layer are one run where both sides are contiguous; so are layers of one run each that follow each other.

    Args:
        pages: int64 (layers, chunks), chunks > 0. sizes: int64 (chunks,), bytes.
    """

    def __init__(self, slabs: Slabs, pages: Int64s, sizes: Int64s, device_stride: int) -> None:
        self._memory, self._span, self._pages = slabs.memory, slabs.span, pages
        self._layer_bytes = pages.shape[1] * device_stride
        is_packed = slabs.page_stride == device_stride
        self._may_join = is_packed and bool(sizes[-1] == device_stride)
        if is_packed and _are_runs(slabs, pages, sizes):
            first = np.arange(len(pages)) * pages.shape[1]
            self._sizes = np.full(len(pages), self._layer_bytes)
            self._ends = list(range(len(pages) + 1))
        else:
            starts = self._find_starts(slabs, sizes, device_stride)
            first = starts.ravel().nonzero()[0]
            self._sizes = np.add.reduceat(sizes[None].repeat(len(pages), axis=0).ravel(), first)
            self._ends = [0, *starts.sum(axis=1).cumsum().tolist()]
        self._slab_of, inner = np.divmod(pages.ravel()[first], slabs.span)
        self._offsets = inner * slabs.page_stride
        self._addresses = slabs.bases[self._slab_of] + self._offsets
        self._on_device = first * device_stride

    def batch(self, first: int, last: int) -> CopyBatch:
        """The copies of layers [first, last), which share a buffer."""
        run = slice(self._ends[first], self._ends[last])
        if last - first > 1 and self._may_join and all(self._follow[first : last - 1]):
            return self._one_run(run.start, last - first)
        # Stable: pages are loaded from only after the host has seen their last save end.
        return CopyBatch(
            self._memory,
            self._slab_of[run],
            self._offsets[run],
            self._addresses[run],
            self._on_device[run] - first * self._layer_bytes,
            self._sizes[run],
            stable=True,
        )

    def _find_starts(self, slabs: Slabs, sizes: Int64s, device_stride: int) -> npt.NDArray[np.bool_]:
        """Where a run begins, bool (layers, chunks)."""
        pages = self._pages
        starts = np.ones(pages.shape, bool)
        if slabs.page_stride == device_stride:
            follows = (pages[:, 1:] - pages[:, :-1] == 1) & (pages[:, 1:] % slabs.span != 0)
            starts[:, 1:] = ~(follows & (sizes[:-1] == device_stride))
        return starts

    @cached_property
    def _run_bytes(self) -> Int64s:
        """The bytes of so many layers that are one run, int64 (layers + 1,)."""
        sizes: Int64s = np.arange(len(self._pages) + 1) * self._layer_bytes
        return sizes

    @cached_property
    def _follow(self) -> list[bool]:
        """For each layer but the last: whether it and the next one are one run each, and neighbours."""
        pages, ends = self._pages, np.array(self._ends)
        is_one_run = np.diff(ends) == 1
        first, last = pages[1:, 0], pages[:-1, -1]
        follows = (first - last == 1) & (first % self._span != 0) & is_one_run[1:] & is_one_run[:-1]
        found: list[bool] = follows.tolist()
        return found

    def _one_run(self, run: int, num_layers: int) -> CopyBatch:
        """The copy of so many layers that are one run, which begins with this one."""
        place = slice(run, run + 1)
        slabs, offsets, addresses = self._slab_of[place], self._offsets[place], self._addresses[place]
        size = self._run_bytes[num_layers : num_layers + 1]
        return CopyBatch(self._memory, slabs, offsets, addresses, _AT_THE_START, size, stable=True)


def first_batch(slabs: Slabs, pages: Int64s, page_bytes: int) -> CopyBatch:
    """The copies of full pages of one layer, a few: `PageCopies` takes longer, for any number.

    `pages` is int64 (chunks,); page i is at `i * page_bytes` of the buffer.
    """
    is_packed, numbers = slabs.page_stride == page_bytes, pages.tolist()
    starts = [
        i
        for i, page in enumerate(numbers)
        if not (i and is_packed and page == numbers[i - 1] + 1 and page % slabs.span)
    ]
    slab_of = np.array([numbers[i] // slabs.span for i in starts])
    offsets = np.array([numbers[i] % slabs.span * slabs.page_stride for i in starts])
    ends = [*starts[1:], len(numbers)]
    return CopyBatch(
        slabs.memory,
        slab_of,
        offsets,
        slabs.bases[slab_of] + offsets,
        np.array([i * page_bytes for i in starts]),
        np.array([(end - start) * page_bytes for start, end in zip(starts, ends, strict=True)]),
        stable=True,
    )


def _are_runs(slabs: Slabs, pages: Int64s, sizes: Int64s) -> bool:
    """Whether each layer is one run of full pages, as it is where all were stored together.

    Their copies are worked out in half the time that those of other pages take.
    """
    if (sizes != slabs.page_stride).any() or (pages[:, 1:] - pages[:, :-1] != 1).any():
        return False
    return bool((pages[:, 0] % slabs.span).max() + pages.shape[1] <= slabs.span)
