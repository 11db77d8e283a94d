"""Connectors with one fault each: the tests must tell them from a right one."""

from __future__ import annotations

from typing import Any

import torch

from lwkv.integrations.vllm.connector import LWKVConnector
from lwkv.integrations.vllm.orders import StepOrders
from lwkv.integrations.vllm.worker.side import WorkerSide


class NeverHits(LWKVConnector):
    """Finds nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False


class _WithWorker(LWKVConnector):
    """Has a worker's half of another class."""

    half: type[WorkerSide]

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._worker.__class__ = self.half


class _Spoiling(WorkerSide):
    """Changes pages in host memory before they are loaded."""

    def begin(self, orders: StepOrders) -> None:
        if orders.loads:
            self.spoil()
        super().begin(orders)

    def spoil(self) -> None:
        for layer in range(self.engine.num_layers):
            for page in self.pages(layer):
                page.copy_(torch.randint(0, 60, page.shape, dtype=torch.uint8))

    def pages(self, layer: int) -> list[torch.Tensor]:
        """The pages of all chunks in a layer."""
        engine = self.engine
        assert engine.flush()
        storage = engine.parts().storage
        chunks = list(storage.host._chunks.values())
        return [storage._pool.page(int(chunk.pages[layer])) for chunk in chunks]


class _SpoilingOneBlock(_Spoiling):
    def spoil(self) -> None:
        # A chunk has two blocks.
        for page in self.pages(2)[:1]:
            half = page[: len(page) // 2]
            half.copy_(torch.randint(0, 60, half.shape, dtype=torch.uint8))


class _Late(WorkerSide):
    """Loads when the model has been computed, and says that all is well."""

    def start_load(self, hooks_come: bool = True) -> None:
        pass

    def wait_for_layer(self, name: str) -> None:
        pass

    def save_layer(self, name: str) -> None:
        if self._orders.stores and not self._ended:
            self._store_steps.save_kv_layer(name)

    def _end_loads(self) -> None:
        if not self._loads_ended:
            self._loads_ended = True
            self._load_steps.wait_for_save()


class Garbage(_WithWorker):
    """Loads anything."""

    half = _Spoiling


class OneBlock(_WithWorker):
    """Loads one wrong block in one layer."""

    half = _SpoilingOneBlock


class AfterUse(_WithWorker):
    """Loads too late."""

    half = _Late
