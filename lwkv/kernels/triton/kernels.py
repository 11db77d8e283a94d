"""The kernels in Triton: one launch moves K and V of all rows of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from lwkv.kernels.protocol import Rows, StagedLayers, Turn
from lwkv.kernels.rotation import check_rotatable
from lwkv.kernels.triton import rotation_source, source
from lwkv.kernels.triton.joined import join_layers
from lwkv.kernels.triton.launch import Key, Launch, is_callable_compiled, sizes_and_strides
from lwkv.layouts.paged_layer import PagedLayer


class TritonKernels:
    """`Kernels` for devices with Triton. Rows out of range are left out.

    The first call for layers of one form compiles, for about a second: make one without rows at start.
    """

    name = "triton"

    def __init__(self) -> None:
        self.takes_handles = is_callable_compiled(source.move)
        self._launches: WeakKeyDictionary[PagedLayer, dict[Key, Launch]] = WeakKeyDictionary()
        self._compiled: dict[Key, Any] = {}
        self._joined: dict[tuple[bool, PagedLayer], Launch] = {}

    def scatter(self, layer: PagedLayer, staging: Tensor, rows: Rows) -> None:
        self.move_layers(True, StagedLayers([layer], staging, 0, rows))

    def gather(self, layer: PagedLayer, staging: Tensor, rows: Rows) -> None:
        self.move_layers(False, StagedLayers([layer], staging, 0, rows))

    def prepare(self, layers: Sequence[PagedLayer]) -> None:
        if self.takes_handles:
            self._joined.update(join_layers(layers, self._compiled))

    def move_layers(self, scatter: bool, staged: StagedLayers, handle: int | None = None) -> None:
        layers, staging, step, _, turn = staged
        first = layers[0]
        if len(layers) == 1 and turn is not None:
            self._scatter_turned(staged, turn, handle)
        elif len(layers) == 1:
            launch = self._find(first, (scatter, staging.data_ptr() % 16), self._make_move)
            launch(staged, (staging.numel() // first.row_bytes,), handle)
        elif self._joined and turn is None:
            sizes = step // first.row_bytes, step // first.words[0].element_size()
            self._joined[scatter, first](staged, sizes, handle)
        else:
            for layer, its_staging in staged.one_by_one():
                self.move_layers(scatter, staged._replace(layers=[layer], staging=its_staging), handle)

    def _scatter_turned(self, staged: StagedLayers, turn: Turn, handle: int | None) -> None:
        (layer,), (cos, sin, angle_of, interleaved), staging = staged.layers, turn, staged.staging
        check_rotatable(layer)
        key = (interleaved, cos.shape[1], *(t.data_ptr() % 16 for t in (staging, cos, sin)))
        launch = self._find(layer, key, self._make_turned)
        launch(staged, (staging.numel() // layer.row_bytes,), handle, cos, sin, angle_of)

    def _find(self, layer: PagedLayer, key: Key, make: Callable[[PagedLayer, Key], Launch]) -> Launch:
        launches = self._launches.setdefault(layer, {})
        if key not in launches:
            launches[key] = make(layer, key)
        return launches[key]

    def _make_move(self, layer: PagedLayer, key: Key) -> Launch:
        k, v = layer.words[0], layer.words[-1]
        across, constants = layer.row_bytes // k.element_size(), (*sizes_and_strides(k), key[0])
        return Launch(source.move, layer, (k, v), across, constants, key, self._compiled)

    def _make_turned(self, layer: PagedLayer, key: Key) -> Launch:
        interleaved, half, *_ = key
        k, v = layer.k.view(layer.dtype), layer.words[-1]
        word = v.element_size() // k.element_size()
        across = layer.heads * max(half, layer.width - 2 * half, layer.width // word)
        constants = (*sizes_and_strides(k), half, interleaved, word)
        return Launch(rotation_source.scatter_turned, layer, (k, v), across, constants, key, self._compiled)
