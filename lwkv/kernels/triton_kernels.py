"""The kernels in Triton: one launch moves K and V of all rows of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from lwkv.kernels import triton_rotation, triton_source
from lwkv.kernels.protocol import Rows
from lwkv.kernels.rotation import check_rotatable
from lwkv.paged_layer import PagedLayer

# Elements of one program's tile of K: four 16-byte loads a thread, with 8-byte words and 128 threads.
TILE = 1024

Key: TypeAlias = "tuple[Any, ...]"


class TritonKernels:
    """`Kernels` for devices with Triton. Rows out of range are left out.

    The first call for layers of one form compiles, for about a second: make one without rows at start.
    """

    name = "triton"

    def __init__(self) -> None:
        self.takes_handles = _can_be_called_as_compiled()
        self._launches: WeakKeyDictionary[PagedLayer, dict[Key, _Launch]] = WeakKeyDictionary()
        self._compiled: dict[Key, Any] = {}

    def scatter(self, layer: PagedLayer, staging: Tensor, rows: Rows, handle: int | None = None) -> None:
        self._find(layer, ("scatter", staging.data_ptr() % 16), _make_move)(staging, rows, handle)

    def gather(self, layer: PagedLayer, staging: Tensor, rows: Rows, handle: int | None = None) -> None:
        self._find(layer, ("gather", staging.data_ptr() % 16), _make_move)(staging, rows, handle)

    def scatter_rotated(
        self, layer: PagedLayer, staging: Tensor, rows: Rows, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> None:
        check_rotatable(layer)
        key = (interleaved, cos.shape[1], *(t.data_ptr() % 16 for t in (staging, cos, sin)))
        self._find(layer, key, _make_rotated)(staging, rows, None, cos, sin)

    def _find(
        self, layer: PagedLayer, key: Key, make: Callable[[PagedLayer, Key, dict[Key, Any]], _Launch]
    ) -> _Launch:
        launches = self._launches.get(layer)
        if launches is None:
            launches = self._launches[layer] = {}
        launch = launches.get(key)
        if launch is None:
            launch = launches[key] = make(layer, key, self._compiled)
        return launch


class _Launch:
    """A kernel for one layer, and for pointers of the alignment that its key names.

    Triton looks at all arguments of a call to find what it compiled for them; here that cannot change. What
    is compiled serves all layers that differ in their addresses and their number of rows only, and takes
    addresses: its launcher asks the driver about every tensor.
    """

    def __init__(
        self,
        kernel: Any,
        layer: PagedLayer,
        views: tuple[Tensor, Tensor],
        across: int,
        constants: tuple[object, ...],
        key: Key,
        compiled: dict[Key, Any],
    ) -> None:
        k, v = self._views = views
        self._addresses = k.data_ptr(), v.data_ptr()
        self._kernel, self._across = kernel, across
        self._run: Any = None
        self._row_bytes, self._num_rows = layer.row_bytes, layer.num_rows
        self._down, self._columns = _tile(across)
        self._constants = (*k.shape[1:], *k.stride()[:3], *constants, self._down, self._columns, layer.parts)
        alike = ((view.dtype, view.data_ptr() % 16) for view in views)
        self._form, self._compiled = (kernel, key, *alike, *self._constants), compiled

    def __call__(self, staging: Tensor, rows: Rows, handle: int | None, *tables: Tensor) -> None:
        count = rows.slots.shape[0]
        grid = -(-count // self._down), -(-self._across // self._columns), 1
        numbers = (count, self._num_rows, staging.numel() // self._row_bytes, *self._constants)
        if self._run is None or self._run is self._kernel:
            pointers = (*self._views, staging, rows.slots, rows.k_rows, rows.v_rows, *tables)
            self._run = self._find((*pointers, *numbers))
            if self._run is self._kernel:
                self._run[grid](*pointers, *numbers)
                return
        addresses = (*self._addresses, staging.data_ptr(), *rows.addresses(), *(t.data_ptr() for t in tables))
        self._run[grid](*addresses, *numbers, stream=handle)

    def _find(self, arguments: tuple[Any, ...]) -> Any:
        if self._form not in self._compiled:
            self._compiled[self._form] = _compile(self._kernel, arguments)
        return self._compiled[self._form]


def _make_move(layer: PagedLayer, key: Key, compiled: dict[Key, Any]) -> _Launch:
    k, v = layer.words
    across = layer.row_bytes // k.element_size()
    views, constants = (k, k if v is None else v), (key[0] == "scatter",)
    return _Launch(triton_source.move, layer, views, across, constants, key, compiled)


def _make_rotated(layer: PagedLayer, key: Key, compiled: dict[Key, Any]) -> _Launch:
    interleaved, half, *_ = key
    k, (words, v) = layer.k.view(layer.dtype), layer.words
    word = words.element_size() // k.element_size()
    across = layer.heads * max(half, layer.width - 2 * half, layer.width // word)
    views, constants = (k, words if v is None else v), (half, interleaved, word)
    return _Launch(triton_rotation.scatter_rotated, layer, views, across, constants, key, compiled)


def _compile(kernel: Any, arguments: tuple[Any, ...]) -> Any:
    """Compile, where a compiled kernel can be called as it is."""
    if not (_can_be_called_as_compiled() and isinstance(kernel, triton.JITFunction)):
        return kernel
    return kernel.warmup(*arguments, grid=(1,))


def _can_be_called_as_compiled() -> bool:
    """Whether compiled kernels take a grid, their arguments and a stream: since Triton 3.3."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version >= (3, 3)


def _tile(across: int) -> tuple[int, int]:
    """Rows and columns of one program, for rows of so many columns."""
    columns = min(triton.next_power_of_2(across), TILE)
    return TILE // columns, columns
