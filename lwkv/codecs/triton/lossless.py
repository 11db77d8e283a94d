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
    """Groups of rows a program, and warps a program, where pages are decoded and where they are coded.

    Warps are for rows of up to 256 elements; longer ones get more.
    """

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
        columns = triton.next_power_of_2(pairs)
        sizes = form.rows, pairs, columns, form.groups, form.page_bytes
        places = form.tops_at, form.codes_at, form.signs_at, form.escapes_at
        header = form.rows, pairs, form.groups, form.num_starts, form.page_bytes, form.escapes_at
        decoded, coded = tuning.decode_groups, tuning.encode_groups
        warps, code_warps = (_warps(asked, columns) for asked in (tuning.decode_warps, tuning.encode_warps))
        all_of_them = (*sizes, *places)
        self._decode = _Kernel(source.decode, (CODED, HALVES, WORDS, RAW), (*all_of_them, decoded), warps)
        self._encode = _Kernel(source.encode, (CODED, HALVES, WORDS, RAW), (*all_of_them, coded), code_warps)
        self._number = _Kernel(source.number, (CODED, WORDS), (*header, *MAGIC, VERSION, BLOCK), code_warps)
        escapes = form.codes_at, form.escapes_at, coded
        self._collect = _Kernel(source.collect, (CODED, WORDS, RAW), (*sizes, *escapes), code_warps)
        self._decode_grid, self._encode_grid = -(-form.groups // decoded), -(-form.groups // coded)

    def prepare(self, device_memory: Tensor) -> None:
        if self.takes_handles:
            for kernel in (self._decode, self._encode, self._number, self._collect):
                kernel.compile(device_memory, device_memory)

    def encode(self, raw: Tensor, coded: Tensor, num_pages: int, handle: int | None = None) -> None:
        groups = self._encode_grid, num_pages, 1
        self._encode(groups, coded, raw, handle)
        self._number((num_pages, 1, 1), coded, raw, handle)
        self._collect(groups, coded, raw, handle)

    def decode(self, coded: Tensor, raw: Tensor, num_pages: int, handle: int | None = None) -> None:
        self._decode((self._decode_grid, num_pages, 1), coded, raw, handle)

    def whole(self, heads: npt.NDArray[np.uint8]) -> Flags:
        return self._form.whole(heads)


def _warps(asked: int, columns: int) -> int:
    """As many as were asked for; more for rows that are longer than most, each of which takes registers."""
    return max(asked, min(16, asked * columns // 128))


class _Pointer(NamedTuple):
    """What a kernel is given: coded pages, or with `is_raw` raw ones, as numbers of a dtype."""

    is_raw: bool
    dtype: torch.dtype


CODED, HALVES, WORDS = (_Pointer(False, dtype) for dtype in (torch.uint8, torch.int16, torch.int32))
RAW = _Pointer(True, torch.int32)


class _Kernel:
    """A kernel with its pointers and constants; all tensors begin at multiples of 16 bytes."""

    def __init__(
        self, kernel: Any, pointers: tuple[_Pointer, ...], constants: tuple[int, ...], warps: int
    ) -> None:
        self._kernel, self._pointers, self._constants, self._warps = kernel, pointers, constants, warps
        self._compiled: Any = None

    def compile(self, coded: Tensor, raw: Tensor) -> None:
        tensors = self._tensors(coded, raw)
        self._compiled = self._kernel.warmup(*tensors, *self._constants, grid=(1,), num_warps=self._warps)

    def __call__(self, grid: tuple[int, int, int], coded: Tensor, raw: Tensor, handle: int | None) -> None:
        if handle is None:
            self._kernel[grid](*self._tensors(coded, raw), *self._constants, num_warps=self._warps)
            return
        if self._compiled is None:
            self.compile(coded, raw)
        # What is compiled takes addresses: its launcher asks the driver about every tensor.
        addresses = coded.data_ptr(), raw.data_ptr()
        given = [addresses[pointer.is_raw] for pointer in self._pointers]
        self._compiled[grid](*given, *self._constants, stream=handle)

    def _tensors(self, coded: Tensor, raw: Tensor) -> list[Tensor]:
        return [(coded, raw)[pointer.is_raw].view(pointer.dtype) for pointer in self._pointers]
