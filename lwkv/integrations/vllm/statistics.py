"""What lwkv did, for vLLM's log and for vLLM's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from lwkv.integrations.vllm.worker.meter import RANK_MARK, summed_over_ranks

PREFIX = "vllm:lwkv_"


class LWKVStats(KVConnectorStats):
    """Counts since the last report, which add up over ranks and steps, and each rank's last gauges."""

    data: dict[str, int]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = count if RANK_MARK in name else self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(summed_over_ranks(self.data).items()))

    def is_empty(self) -> bool:
        return not self.data


class LWKVPromMetrics(KVConnectorPromMetrics):
    """A counter for each count, vllm:lwkv_<count>_total, made when it first counts something; gauges without
    `_total`, over all ranks."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._made: dict[str, Any] = {}
        self._gauges: dict[int, dict[str, int]] = {}

    def observe(self, transfer_stats_data: Mapping[str, int], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        gauges = self._gauges.setdefault(engine_idx, {})
        for name, count in transfer_stats_data.items():
            if RANK_MARK in name:
                gauges[name] = count
            else:
                self._metric(self._counter_cls, name).labels(*labels).inc(count)
        for name, number in summed_over_ranks(gauges).items():
            self._metric(self._gauge_cls, name).labels(*labels).set(number)

    def _metric(self, kind: Any, name: str) -> Any:
        if name not in self._made:
            # Another engine of this process may have made it.
            made = REGISTRY._names_to_collectors.get(f"{PREFIX}{name}")
            self._made[name] = made or kind(
                name=f"{PREFIX}{name}",
                documentation=f"lwkv: {name.replace('_', ' ')}",
                labelnames=self._labelnames,
            )
        return self._made[name]
