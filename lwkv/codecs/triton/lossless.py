"""Lossless pages in Triton: one launch decodes pages, three code them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from lwkv.codecs.lossless_form import MAGIC, VERSION, LosslessForm
from lwkv.codecs.page_codec import Flags
from lwkv.codecs.triton import source
from lwkv.kernels.triton.launch import is_callable_compiled

BLOCK = 1024


class Tuning(NamedTuple):
    """Groups of rows a program, and warps a program, where pages are decoded and where they are coded."""

    decode_groups: int = 1
    decode_warps: int = 4
    encode_groups: int = 1
    encode_warps: int = 4


class TritonLossless:
    """A `Coder` for devices with Triton. The first call compiles, for about a second: see `prepare`."""

    def __init__(self, form: LosslessForm, tuning: Tuning = Tuning()) -> None:  # noqa: B008
        self._form = form
        self.raw_bytes, self.page_bytes, self.head_bytes = form.raw_bytes, form.page_bytes, form.head_bytes
        self.takes_handles = is_callable_compiled(source.decode)
        pairs = form.width // 2
        sizes = form.rows, pairs, triton.next_power_of_2(pairs), form.groups, form.page_bytes
        places = form.tops_at, form.codes_at, form.signs_at, form.escapes_at
        header = form.rows, pairs, form.groups, form.num_starts, form.page_bytes, form.escapes_at
        decoded, coded = tuning.decode_groups, tuning.encode_groups
        self._decode = _Kernel(source.decode, (*sizes, *places, decoded), tuning.decode_warps)
        self._encode = _Kernel(source.encode, (*sizes, *places, coded), tuning.encode_warps)
        self._number = _Kernel(source.number, (*header, *MAGIC, VERSION, BLOCK), tuning.encode_warps)
        self._collect = _Kernel(
            source.collect, (*sizes, form.codes_at, form.escapes_at, coded), tuning.encode_warps
        )
        self._decode_grid, self._encode_grid = -(-form.groups // decoded), -(-form.groups // coded)

    def prepare(self, device_memory: Tensor) -> None:
        if self.takes_handles:
            for kernel, tensors in self._calls(device_memory, device_memory):
                kernel.compile(tensors)

    def encode(self, raw: Tensor, coded: Tensor, num_pages: int, handle: int | None = None) -> None:
        _, *calls = self._calls(coded, raw)
        grids = (self._encode_grid, num_pages, 1), (num_pages, 1, 1), (self._encode_grid, num_pages, 1)
        for (kernel, tensors), grid in zip(calls, grids, strict=True):
            kernel(grid, tensors, handle)

    def decode(self, coded: Tensor, raw: Tensor, num_pages: int, handle: int | None = None) -> None:
        kernel, tensors = self._calls(coded, raw)[0]
        kernel((self._decode_grid, num_pages, 1), tensors, handle)

    def whole(self, heads: npt.NDArray[np.uint8]) -> Flags:
        return self._form.whole(heads)

    def _calls(self, coded: Tensor, raw: Tensor) -> list[tuple[_Kernel, tuple[Tensor, ...]]]:
        halves, words, pages = coded.view(torch.int16), coded.view(torch.int32), raw.view(torch.int32)
        return [
            (self._decode, (coded, halves, words, pages)),
            (self._encode, (coded, halves, words, pages)),
            (self._number, (coded, words)),
            (self._collect, (coded, words, pages)),
        ]


class _Kernel:
    """A kernel with its constants; its tensors begin at multiples of 16 bytes."""

    def __init__(self, kernel: Any, constants: tuple[int, ...], warps: int) -> None:
        self._kernel, self._constants, self._warps = kernel, constants, warps
        self._compiled: Any = None

    def compile(self, tensors: tuple[Tensor, ...]) -> None:
        self._compiled = self._kernel.warmup(*tensors, *self._constants, grid=(1,), num_warps=self._warps)

    def __call__(self, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], handle: int | None) -> None:
        if handle is None:
            self._kernel[grid](*tensors, *self._constants, num_warps=self._warps)
            return
        if self._compiled is None:
            self.compile(tensors)
        # What is compiled takes addresses: its launcher asks the driver about every tensor.
        self._compiled[grid](*map(Tensor.data_ptr, tensors), *self._constants, stream=handle)
