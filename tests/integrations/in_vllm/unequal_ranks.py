"""Connectors of which one rank of two lacks what the other one has."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from lwkv.integrations.vllm.blending.orders import BlendOrder
from lwkv.integrations.vllm.connector import LWKVConnector
from lwkv.integrations.vllm.hybrid.orders import HybridOrders


class UnequalRanks(LWKVConnector):
    """Of three blends, rank 1 has lost its chunks at the first one, and its loads fail at the second one."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        if get_tp_group().rank_in_group == 1:
            assert self._worker is not None
            self._fail(self._worker.engine, self._worker._blending)

    def _fail(self, engine: Any, blending: Any) -> None:
        parts, loader = blending._parts, engine.connector.in_place
        load_layer, blends = loader.load_layer, count()
        is_failing = False

        def fail_in_turn(order: BlendOrder, loads: Any) -> Generator[float, None, bool]:
            nonlocal is_failing
            number = next(blends) % 3
            if number == 0:
                host = engine.parts().storage.host
                assert engine.flush()
                assert host.evict(host.evictable())
            is_failing = number == 1
            try:
                return (yield from parts(order, loads))
            finally:
                is_failing = False

        def fail_at_layer_2(load: Any, layer: int, *rest: Any) -> None:
            if is_failing and layer == 2 and load.plan.transfer.num_chunks:
                raise RuntimeError("the device fails")
            load_layer(load, layer, *rest)

        blending._parts, loader.load_layer = fail_in_turn, fail_at_layer_2


class WithoutLateStates(LWKVConnector):
    """Rank 1 keeps no states of more tokens than these; of all else it keeps what rank 0 has."""

    MOST_TOKENS = 192

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        if get_tp_group().rank_in_group == 1:
            worker: Any = self._worker
            begin, known = worker.begin, dict[int, tuple[HybridOrders, HybridOrders]]()

            def begin_with_less(orders: HybridOrders) -> None:
                if orders.step not in known:  # the same orders come several times
                    known.clear()
                    known[orders.step] = orders, self._with_less(orders)
                begin(known[orders.step][1])

            worker.begin = begin_with_less

    def _with_less(self, orders: HybridOrders) -> HybridOrders:
        stores = [
            replace(store, boundaries=frozenset(at for at in store.boundaries if at <= self.MOST_TOKENS))
            for store in orders.stores
        ]
        return replace(orders, stores=stores)
