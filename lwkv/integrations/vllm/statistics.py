"""What lwkv did, for vLLM's log and for vLLM's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import REGISTRY, Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

PREFIX = "vllm:lwkv_"


class LWKVStats(KVConnectorStats):
    """Counts since the last step that moved anything; those of several ranks and steps add up."""

    data: dict[str, int]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: self.data[name] for name in sorted(self.data)}

    def is_empty(self) -> bool:
        return not self.data


class LWKVPromMetrics(KVConnectorPromMetrics):
    """A counter for each count, called vllm:lwkv_<count>_total, made when it first counts something."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counters: dict[str, Any] = {}

    def observe(self, transfer_stats_data: Mapping[str, int], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._counter(name).labels(*self.per_engine_labelvalues[engine_idx]).inc(count)

    def _counter(self, name: str) -> Counter:
        if name not in self._counters:
            # Another engine of this process may have made it.
            made = REGISTRY._names_to_collectors.get(f"{PREFIX}{name}")
            self._counters[name] = made or self._counter_cls(
                name=f"{PREFIX}{name}",
                documentation=f"lwkv: {name.replace('_', ' ')}",
                labelnames=self._labelnames,
            )
        return self._counters[name]
