"""Two other ways to load, which the layerwise one is compared with: in bulk, and with a block spoiled."""

from __future__ import annotations

from collections.abc import Sequence

from lwkv.engine import CacheEngine
from lwkv.reference import PagedCache
from lwkv.reference.hooks import Outcome
from lwkv.request import Request
from lwkv.steps import LayerSteps
from lwkv.transfer import NO_SLOT


class BulkLoads:
    """Loads a request whole, in all layers, before its forward pass begins; stores nothing."""

    def __init__(self, engine: CacheEngine) -> None:
        self._engine = engine
        self._loads: Sequence[Request] = ()
        self._outcome = Outcome([], False)

    def begin(self, loads: Sequence[Request], stores: Sequence[Request]) -> None:
        self._loads = loads

    def start_load_kv(self) -> list[int]:
        masks = [
            self._engine.retrieve(load.tokens, load.mask, slot_mapping=load.slot_mapping, salts=load.salts)
            for load in self._loads
        ]
        self._outcome = Outcome(masks, False)
        return [int(mask.sum()) for mask in masks]

    def wait_for_layer_load(self, layer: int) -> None:
        pass

    def save_kv_layer(self, layer: int) -> None:
        pass

    def wait_for_save(self) -> Outcome:
        return self._outcome


class SpoiledLoads(LayerSteps):
    """Loads layer by layer, then forgets one block: zeros in place of its KV, in every layer.

    It is the last block that was loaded. What does not change then did not rest on it. Blocks must be the
    first dimension of the cache's tensors.
    """

    def __init__(self, engine: CacheEngine, cache: PagedCache) -> None:
        self._layers = list(cache.tensors.values())
        self._block_size = cache.block_size
        self._blocks: list[int] = []
        super().__init__(engine)

    def begin(self, loads: Sequence[Request], stores: Sequence[Request]) -> None:
        super().begin(loads, stores)
        self._blocks = [self._last_block(load) for load in loads]

    def wait_for_layer_load(self, layer: int) -> None:
        super().wait_for_layer_load(layer)
        for block in self._blocks:
            self._layers[layer][block].zero_()

    def _last_block(self, load: Request) -> int:
        return int(load.slot_mapping[load.slot_mapping != NO_SLOT][-1]) // self._block_size
