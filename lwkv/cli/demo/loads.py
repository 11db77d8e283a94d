"""Loads with a block spoiled, which show that answers depend on what was loaded."""

from __future__ import annotations

from collections.abc import Sequence

from lwkv.engine import CacheEngine
from lwkv.reference import PagedCache
from lwkv.request import AnyRequest, Request
from lwkv.steps import LayerSteps
from lwkv.storage import Chunk
from lwkv.transfer import NO_SLOT


class SpoiledLoads(LayerSteps):
    """Loads layer by layer, then forgets one block: zeros in place of its KV, in every layer.

    It is the last block that was loaded. What does not change then did not depend on it. Blocks must be the
    first dimension of the cache's tensors.
    """

    def __init__(self, engine: CacheEngine, cache: PagedCache) -> None:
        self._caches = list(cache.tensors.values())
        self._block_size = cache.block_size
        self._blocks: list[int] = []
        super().__init__(engine)

    def begin(
        self,
        loads: Sequence[AnyRequest],
        stores: Sequence[AnyRequest],
        load_within_s: float = float("inf"),
        pinned: Sequence[Sequence[Chunk | None] | None] = (),
    ) -> None:
        super().begin(loads, stores, load_within_s, pinned)
        self._blocks = [self._last_block(load) for load in loads if isinstance(load, Request)]

    def wait_for_layer_load(self, layer: str | int) -> None:
        super().wait_for_layer_load(layer)
        for block in self._blocks:
            self._caches[self._layer_of[layer]][block].zero_()

    def _last_block(self, load: Request) -> int:
        return int(load.slot_mapping[load.slot_mapping != NO_SLOT][-1]) // self._block_size
