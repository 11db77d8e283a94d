"""Launching the kernels of page codecs with as little of the host's time as it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lwkv.kernels.triton.launch import start

Grid = tuple[int, int, int]


class Pointer(NamedTuple):
    """What a kernel is given: the tensor of this number, as numbers of a dtype."""

    number: int
    dtype: torch.dtype


class Kernel:
    """A kernel with its pointers and constants; all tensors begin at multiples of 16 bytes.

    Args:
        pointers: the first arguments; numbers that differ from call to call follow, then the constants.
    """

    def __init__(
        self, kernel: Any, pointers: Sequence[Pointer], constants: Sequence[int], num_warps: int
    ) -> None:
        self._kernel, self._pointers, self._constants = kernel, pointers, constants
        self._num_warps = num_warps
        self._compiled: Any = None

    def __call__(
        self, grid: Grid, tensors: Sequence[Tensor], handle: int | None, numbers: Sequence[int] = ()
    ) -> None:
        """Queue it on the current stream, or on that of a `handle`."""
        if handle is None:
            views = self._views(tensors)
            self._kernel[grid](*views, *numbers, *self._constants, num_warps=self._num_warps)
            return
        if self._compiled is None:
            self._compile(tensors, numbers)
        # What is compiled takes addresses: its launcher asks the driver about every tensor.
        addresses = [tensor.data_ptr() for tensor in tensors]
        given = [addresses[pointer.number] for pointer in self._pointers]
        start(self._compiled, grid, handle, (*given, *numbers, *self._constants))

    def _compile(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> None:
        views = self._views(tensors)
        self._compiled = self._kernel.warmup(
            *views, *numbers, *self._constants, grid=(1,), num_warps=self._num_warps
        )

    def _views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[pointer.number].view(pointer.dtype) for pointer in self._pointers]
