"""Launching Triton's kernels with as little of the host's time as it takes."""

from __future__ import annotations

from typing import Any, TypeAlias

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from lwkv.kernels.protocol import StagedLayers
from lwkv.layouts.paged_layer import PagedLayer

# Elements of one program's tile of K: four 16-byte loads a thread, with 8-byte words and 128 threads.
TILE = 1024

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
# How what is compiled calls its launcher is not documented: the same in these, and a test compares it.
IS_KNOWN = (3, 6) <= VERSION <= (3, 9)

Key: TypeAlias = "tuple[Any, ...]"


class Launch:
    """A kernel for one layer, or more behind it, and for pointers of the alignment that its key names.

    Triton looks at all arguments of a call to find what it compiled for them; here that cannot change. What
    is compiled serves all layers that differ in their addresses and their number of rows only, and takes
    addresses: its launcher asks the driver about every tensor.

    Args:
        views: the kernel's first pointers; those of staging, rows and tables follow.
        across: columns of a row.
    """

    def __init__(
        self,
        kernel: Any,
        layer: PagedLayer,
        views: tuple[Tensor, ...],
        across: int,
        constants: tuple[object, ...],
        key: Key,
        compiled: dict[Key, Any],
    ) -> None:
        self._views, self._addresses = views, [view.data_ptr() for view in views]
        self._kernel, self._across = kernel, across
        self._run: Any = None
        self._num_rows = layer.num_rows
        self._down, self._columns = tile(across)
        self._constants = (*constants, self._down, self._columns, layer.parts)
        alike = ((view.dtype, view.data_ptr() % 16) for view in views)
        self._form, self._compiled = (kernel, key, *alike, *self._constants), compiled

    def __call__(
        self, staged: StagedLayers, sizes: tuple[int, ...], handle: int | None, *tables: Tensor
    ) -> None:
        """Queue it; `sizes` are what it takes between its number of rows and its constants."""
        layers, staging, _, rows, _ = staged
        count = rows.slots.shape[0]
        grid = -(-count // self._down), -(-self._across // self._columns), len(layers)
        numbers = (count, self._num_rows, *sizes, *self._constants)
        tensors = (staging, *rows, *tables)
        if self._run is None or self._run is self._kernel:
            pointers = (*self._views, *tensors)
            if self._form not in self._compiled:
                self._compiled[self._form] = compiled_kernel(self._kernel, (*pointers, *numbers))
            self._run = self._compiled[self._form]
            if self._run is self._kernel:
                self._run[grid](*pointers, *numbers)
                return
        addresses = (*self._addresses, *map(Tensor.data_ptr, tensors))
        start(self._run, grid, handle, (*addresses, *numbers))


def start(compiled: Any, grid: tuple[int, int, int], handle: int | None, arguments: tuple[Any, ...]) -> None:
    """Queue a compiled kernel on the stream with this handle; None is the current one.

    Where it is known how, without Triton's hooks for profilers: eleven calls fewer for a staging buffer.
    """
    if handle is None or not IS_KNOWN:
        compiled[grid](*arguments, stream=handle)
        return
    # `run` comes first: it brings the kernel to the device, which makes `function`.
    run = compiled.run
    run(*grid, handle, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


def sizes_and_strides(k: Tensor) -> tuple[int, ...]:
    """What a kernel gets of a paged view: its sizes and strides."""
    return (*k.shape[1:], *k.stride()[:3])


def compiled_kernel(kernel: Any, arguments: tuple[Any, ...]) -> Any:
    """Compile, where a compiled kernel can be called as it is."""
    return kernel.warmup(*arguments, grid=(1,)) if is_callable_compiled(kernel) else kernel


def is_callable_compiled(kernel: Any) -> bool:
    """Whether what is compiled of it takes a grid, a stream and the arguments.

    Since Triton 3.3, and not in its interpreter.
    """
    return VERSION >= (3, 3) and isinstance(kernel, triton.JITFunction)


def tile(across: int) -> tuple[int, int]:
    """Rows and columns of one program, for rows of so many columns."""
    columns = min(triton.next_power_of_2(across), TILE)
    return TILE // columns, columns
