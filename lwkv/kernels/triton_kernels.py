"""The kernels in Triton: one launch moves K and V of all rows of a layer."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from lwkv.kernels import triton_source
from lwkv.kernels.protocol import Rows
from lwkv.kernels.torch_kernels import check_rotatable
from lwkv.paged_layer import PagedLayer

# Elements of one program's tile of K: four 16-byte loads a thread, with 8-byte words and 128 threads.
TILE = 1024


class TritonKernels:
    """`Kernels` for devices with Triton. Rows out of range are left out.

    The first call for a layer compiles it, for about a second: make one without rows at start.
    """

    name = "triton"

    def __init__(self) -> None:
        self._launches: WeakKeyDictionary[PagedLayer, dict[tuple[bool, bool], _Launch]] = WeakKeyDictionary()

    def scatter(self, layer: PagedLayer, staging: Tensor, rows: Rows) -> None:
        self._move(layer, staging, rows, True)

    def gather(self, layer: PagedLayer, staging: Tensor, rows: Rows) -> None:
        self._move(layer, staging, rows, False)

    def scatter_rotated(
        self, layer: PagedLayer, staging: Tensor, rows: Rows, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> None:
        check_rotatable(layer)
        k, (words, v) = layer.k.view(layer.dtype), layer.words
        half, num_rows = cos.shape[1], rows.slots.shape[0]
        word = words.element_size() // k.element_size()
        widest = layer.heads * max(half, layer.width - 2 * half, layer.width // word)
        tile = _tile(widest)
        triton_source.scatter_rotated[_grid(num_rows, widest, tile)](
            *(k, words if v is None else v, staging, rows.slots, rows.k_rows, rows.v_rows, cos, sin),
            *(num_rows, layer.num_rows, staging.numel() // layer.row_bytes),
            *_shape(k),
            *(half, interleaved, word, *tile, layer.parts),
        )

    def rotate(self, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
        num_rows, heads, _ = k.shape
        half = cos.shape[1]
        tile = _tile(heads * half)
        triton_source.rotate[_grid(num_rows, heads * half, tile)](
            k, cos, sin, num_rows, heads, k.stride(0), k.stride(1), half, interleaved, *tile
        )

    def _move(self, layer: PagedLayer, staging: Tensor, rows: Rows, scatter: bool) -> None:
        k, v = layer.words
        arguments = (
            *(k, k if v is None else v, staging, rows.slots, rows.k_rows, rows.v_rows),
            *(rows.slots.shape[0], layer.num_rows, staging.numel() // layer.row_bytes),
        )
        launches = self._launches.setdefault(layer, {})
        key = scatter, staging.data_ptr() % 16 == 0
        launch = launches.get(key)
        if launch is None:
            launch = launches[key] = _Launch(layer, arguments, scatter)
        launch(arguments)


class _Launch:
    """`triton_source.move` compiled for one layer and direction.

    Triton looks at all arguments of a call to find what it compiled for them; here that cannot change.
    """

    def __init__(self, layer: PagedLayer, arguments: tuple[Any, ...], scatter: bool) -> None:
        k, _ = layer.words
        self._row_words = layer.row_bytes // k.element_size()
        self._tile = _tile(self._row_words)
        self._constants = (*_shape(k), *self._tile, layer.parts, scatter)
        self._compiled = _compile(arguments + self._constants)

    def __call__(self, arguments: tuple[Any, ...]) -> None:
        grid = _grid(arguments[6], self._row_words, self._tile)
        self._compiled[grid](*arguments, *self._constants)


def _compile(arguments: tuple[Any, ...]) -> Any:
    """Compile, where a compiled kernel can be called as it is (since Triton 3.3, not in its interpreter)."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < (3, 3) or not isinstance(triton_source.move, triton.JITFunction):
        return triton_source.move
    return triton_source.move.warmup(*arguments, grid=(1,))


def _shape(k: Tensor) -> tuple[int, ...]:
    """Block size, heads and width of a view, then its outer strides."""
    return (*k.shape[1:], *k.stride()[:3])


def _tile(columns: int) -> tuple[int, int]:
    """Rows and columns of one program, for rows of so many columns."""
    across = min(triton.next_power_of_2(columns), TILE)
    return TILE // across, across


def _grid(rows: int, columns: int, tile: tuple[int, int]) -> tuple[int, int, int]:
    return -(-rows // tile[0]), -(-columns // tile[1]), 1
