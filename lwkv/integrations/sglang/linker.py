"""The class that SGLang makes: its calls, passed to a CacheLink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.version import __version__ as sglang_version

from lwkv.engine import CacheEngine
from lwkv.errors import ConfigError
from lwkv.integrations.host_memory import wait_for_memory
from lwkv.integrations.sglang.link import CacheLink
from lwkv.integrations.sglang.pools import (
    Rank,
    describe,
    device_of,
    refuse_algorithm,
    refuse_components,
)
from lwkv.integrations.sglang.settings import read_settings
from lwkv.integrations.sglang.statistics import Statistics
from lwkv.integrations.sglang.versions import check_version
from lwkv.platforms import platform_for


class LWKVLinker(UnifiedCacheLinker):
    """Keeps SGLang's KV cache in lwkv and brings it back layer by layer.

    SGLang makes one in every worker, and chooses it by

        --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
        --unified-cache-external-linker-config '{"linker": "LWKVLinker",
            "linker_module_path": "lwkv.integrations.sglang", "linker_extra_config": {...}}'

    Raises:
        ConfigError (a ValueError): another version of SGLang, a setting that cannot work there, or a model
            whose cache lwkv does not move.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Sequence[Any],
        extra_config: Mapping[str, object],
        forward_stream: Any = None,
    ) -> None:
        check_version(sglang_version)
        refuse_components([component.name for component in components])
        refuse_algorithm(getattr(server_args, "speculative_algorithm", None))
        settings = read_settings(extra_config, int(params.page_size))
        rank, num_ranks = _rank(params)
        flush_name = _common_name(params.tp_cache_group) if num_ranks > 1 else None
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        drafts = (*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools)
        described = describe(pool, drafts, server_args, rank)
        engine = CacheEngine.create(
            settings,
            described.metadata,
            described.caches,
            engine="sglang",
            layout_hints=described.hints,
            platform=platform_for(device_of(described)),
        )
        wait_for_memory(engine)  # SGLang has captured its graphs by now
        self.forward_stream = forward_stream
        self.link = CacheLink(
            engine, described.num_layers, num_ranks, forward_stream, settings.forgets, flush_name
        )
        self.layer_done_counter = self.link.layer_counter
        self.pools = {PoolName.KV: pool}
        labels = {"model_name": str(server_args.served_model_name), "tp_rank": str(rank.tp)}
        self._statistics = Statistics(engine, labels) if server_args.enable_metrics else None

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        return self.link.lookup(rid, transfers)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        return self.link.load(rid, transfers)

    def start_layer_wise_loading(self) -> int:
        return self.link.start_layer_wise_loading()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.link.finish_layer_wise_loading(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        return self.link.cancel_queued_load(rid)

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        return self.link.offload(transfers)

    def num_completed_offloads(self) -> int:
        if self._statistics is not None:
            self._statistics.update()
        return self.link.num_completed_offloads()

    def pop_completed_offload(self) -> bool:
        return self.link.pop_completed_offload()

    def reset(self) -> None:
        self.link.reset()

    def close(self) -> None:
        self.link.close()


def _rank(params: Any) -> tuple[Rank, int]:
    """Where this worker stands, and how many must answer alike.

    Raises:
        ConfigError: a split that lwkv does not know.
    """
    for name, why in (
        ("attn_cp_size", "lwkv knows no split along tokens"),
        ("pp_size", "SGLang does not bring the lookups of pipeline ranks together"),
    ):
        if (size := getattr(params, name)) > 1:
            raise ConfigError(f"{name}: got {size}; {why}: allowed is 1")
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return Rank(), 1
    everybody = params.tp_cache_group
    group = params.attn_tp_cache_group or everybody
    rank = Rank(torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group))
    return rank, torch.distributed.get_world_size(group=everybody)


def _common_name(group: Any) -> str:
    """A name that all ranks of the group get, and nobody else. All of them call it."""
    names = [uuid4().hex]
    torch.distributed.broadcast_object_list(names, torch.distributed.get_global_rank(group, 0), group)
    return names[0]
