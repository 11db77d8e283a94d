"""The kernels in Triton: one launch moves K and V of all rows of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from lwkv.kernels import triton_rotation, triton_source
from lwkv.kernels.protocol import Rows, Sharing
from lwkv.kernels.rotation import check_rotatable
from lwkv.kernels.triton_joined import JoinedLayers
from lwkv.kernels.triton_launch import Key, Launch, is_callable_compiled
from lwkv.paged_layer import PagedLayer


class TritonKernels:
    """`Kernels` for devices with Triton. Rows out of range are left out.

    The first call for layers of one form compiles, for about a second: make one without rows at start.
    """

    name = "triton"

    def __init__(self) -> None:
        self.takes_handles = is_callable_compiled(triton_source.move)
        self._launches: WeakKeyDictionary[PagedLayer, dict[Key, Launch]] = WeakKeyDictionary()
        self._compiled: dict[Key, Any] = {}
        self._joined: JoinedLayers | None = None

    def scatter(self, layer: PagedLayer, staging: Tensor, rows: Rows) -> None:
        self._move(True, layer, staging, rows)

    def gather(self, layer: PagedLayer, staging: Tensor, rows: Rows) -> None:
        self._move(False, layer, staging, rows)

    def introduce(self, layers: Sequence[PagedLayer]) -> None:
        self._joined = JoinedLayers(layers) if self.takes_handles else None

    def move_layers(self, scatter: bool, sharing: Sharing, handle: int | None = None) -> None:
        if self._joined is not None and len(sharing.layers) > 1:
            self._joined.move(scatter, sharing, handle)
            return
        for layer, staging in sharing.parts():
            self._move(scatter, layer, staging, sharing.rows, handle)

    def scatter_rotated(
        self, layer: PagedLayer, staging: Tensor, rows: Rows, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> None:
        check_rotatable(layer)
        key = (interleaved, cos.shape[1], *(t.data_ptr() % 16 for t in (staging, cos, sin)))
        self._find(layer, key, self._make_rotated)(staging, rows, None, cos, sin)

    def _move(
        self, scatter: bool, layer: PagedLayer, staging: Tensor, rows: Rows, handle: int | None = None
    ) -> None:
        self._find(layer, (scatter, staging.data_ptr() % 16), self._make_move)(staging, rows, handle)

    def _find(self, layer: PagedLayer, key: Key, make: Callable[[PagedLayer, Key], Launch]) -> Launch:
        launches = self._launches.setdefault(layer, {})
        if key not in launches:
            launches[key] = make(layer, key)
        return launches[key]

    def _make_move(self, layer: PagedLayer, key: Key) -> Launch:
        k, v = layer.words[0], layer.words[-1]
        across = layer.row_bytes // k.element_size()
        return Launch(triton_source.move, layer, (k, v), across, key[:1], key, self._compiled)

    def _make_rotated(self, layer: PagedLayer, key: Key) -> Launch:
        interleaved, half, *_ = key
        k, v = layer.k.view(layer.dtype), layer.words[-1]
        word = v.element_size() // k.element_size()
        across = layer.heads * max(half, layer.width - 2 * half, layer.width // word)
        constants = (half, interleaved, word)
        return Launch(triton_rotation.scatter_rotated, layer, (k, v), across, constants, key, self._compiled)
