"""The class that vLLM makes: its hooks, passed to the scheduler's or the worker's half."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.core.sched.scheduler import Scheduler

from lwkv.config.foreign_variables import warn_of_foreign_variables
from lwkv.engine import CacheEngine
from lwkv.errors import ConfigError
from lwkv.integrations.vllm.blending.bring_up import make_blend_worker, make_planner
from lwkv.integrations.vllm.blending.refusals import refuse
from lwkv.integrations.vllm.blending.worker.ranks import Ranks
from lwkv.integrations.vllm.failed_loads import preempt_failed_loads
from lwkv.integrations.vllm.hybrid import bring_up as several_groups
from lwkv.integrations.vllm.hybrid.one_group import log_one_group
from lwkv.integrations.vllm.hybrid.refusals import can_have_groups
from lwkv.integrations.vllm.hybrid.reports import HybridInfo
from lwkv.integrations.vllm.hybrid.scheduler import HybridScheduler
from lwkv.integrations.vllm.hybrid.worker import HybridWorker
from lwkv.integrations.vllm.logs import log_as_vllm
from lwkv.integrations.vllm.reports import RankInfo, RankReport, StepReports
from lwkv.integrations.vllm.scheduler.events import as_event
from lwkv.integrations.vllm.scheduler.kv_events import KVEventLog
from lwkv.integrations.vllm.scheduler.lookup.index import ChunkIndex
from lwkv.integrations.vllm.scheduler.lookup.tier_lookup import open_lower_tiers
from lwkv.integrations.vllm.scheduler.side import Role, SchedulerSide
from lwkv.integrations.vllm.settings import (
    Settings,
    check_role,
    read_settings,
    set_policy,
    warn_of_outer_policy,
)
from lwkv.integrations.vllm.statistics import LWKVPromMetrics, LWKVStats
from lwkv.integrations.vllm.versions import check_version
from lwkv.integrations.vllm.worker.caches import Rank, describe, draft_layers, only_group, window_of
from lwkv.integrations.vllm.worker.forward_pass import calls_hooks
from lwkv.integrations.vllm.worker.side import WorkerSide
from lwkv.platforms import platform_for
from lwkv.shared_host.client.promises import OwnerPromises
from lwkv.storage.registry import tier_urls


class LWKVConnector(KVConnectorBase_V1):
    """Keeps vLLM's KV cache in lwkv and brings it back layer by layer.

    `kv_connector_extra_config` takes lwkv's settings; docs/vllm.md has the table.

    Raises:
        ConfigError: at the start, for settings, models and versions of vLLM that cannot work.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        log_as_vllm()
        check_version(vllm_version)
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        warn_of_foreign_variables()
        self._settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        check_role(vllm_config.kv_transfer_config.kv_role, self._settings)
        if self._settings.enable_blending:
            refuse(vllm_config, kv_cache_config, vllm_version)
        self._worker: WorkerSide | HybridWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = _make_scheduler(self._settings, vllm_config, kv_cache_config)
            set_policy(vllm_config.kv_transfer_config, self._settings)
            preempt_failed_loads(Scheduler)

    @property
    def requires_kv_delivery(self) -> bool:
        # A store that is lost is a miss later on.
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # A graph that is replayed as a whole calls no hooks around layers; its loads come before it, in bulk.
        return False

    # ---- a worker's half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._settings.enable_blending and get_kv_transfer_group() is not self:
            raise ConfigError(
                "enable_blending: lwkv is inside another connector, whose hooks would take the layers of a "
                "blend for those of a step; use LWKVConnector alone, or set enable_blending to false"
            )
        self._worker = _make_worker(self._settings, self._vllm_config, self._kv_cache_config, kv_caches)

    def get_handshake_metadata(self) -> Any:
        # vLLM asks once the model is loaded and warmed up, before it takes requests.
        return None if self._worker is None else self._worker.introduce()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata)
            # Before the pass, which fills the blocks that this uses; loads may be started behind it.
            self._worker.encode()

    def has_connector_metadata(self) -> bool:
        """Whether the hooks around layers have anything to do in this step."""
        if self._worker is not None and self._worker.calls_layers:
            return False
        return self._connector_metadata is not None and self._connector_metadata.moves_anything

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        # What vLLM calls first in a step: while it prepares the model's inputs, layers can be on their way.
        if self._worker is not None:
            self._worker.begin(kv_connector_metadata)
            self._worker.look_up()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_load(calls_hooks(forward_context))

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        # Every worker names those whose blocks `request_finished` has kept; then vLLM frees them.
        if self._worker is None:
            return None, None
        blended = self._worker.blends_ended(finished_req_ids)
        return self._worker.requests_ended() or None, blended or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        # Called by vLLM in place of `get_finished` from 0.30 on.
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            received, failed = self._worker.received()
            results.finished_recving |= received
            results.failed_recving |= failed
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.invalid_blocks()

    def build_connector_worker_meta(self) -> Any:
        report = None if self._worker is None else self._worker.report()
        return StepReports((report,)) if isinstance(report, RankReport) else report

    def get_kv_connector_stats(self) -> Any:
        # vLLM asks both halves and adds the answers up.
        if self._role is KVConnectorRole.SCHEDULER:
            counts = self._scheduler.new_counts()
        else:
            counts = {} if self._worker is None else self._worker.new_counts()
        return LWKVStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return LWKVStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> Any:
        return LWKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- the scheduler's half

    def on_new_request(self, request: Any) -> None:
        # Called by vLLM from 0.22 on.
        self._scheduler.arrived(request)

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        for info in metadata.values():
            # Not that of a connector beside this one.
            if isinstance(info, RankInfo) and isinstance(self._scheduler, SchedulerSide):
                self._scheduler.index.introduce(info)
            elif isinstance(info, HybridInfo) and isinstance(self._scheduler, HybridScheduler):
                self._scheduler.introduce(info)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, Any]) -> None:
        self.set_xfer_handshake_metadata(metadata)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = self._scheduler.num_new_matched_tokens(request, num_computed_tokens)
        return found, bool(found) and self._scheduler.comes_apart(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self._scheduler.orders(scheduler_output)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        # Called by vLLM from 0.32 on.
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        known = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
        sources: dict[Any, int] = {}
        for tier, tokens in self._scheduler.hit_sources(request, num_external_tokens).items():
            source = known.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            sources[source] = sources.get(source, 0) + tokens
        return sources

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids), None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        # Called by vLLM in place of `request_finished` where this class is one of `SupportsHMA`.
        return self._scheduler.finished(request, block_ids[0]), None

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.blends_ended(connector_output.finished_recving or ())
        self._scheduler.learn_failed_blocks(connector_output.invalid_block_ids)
        reports = getattr(connector_output, "kv_connector_worker_meta", None)
        if reports is not None:
            self._scheduler.learn(reports)
        self._scheduler.result_came()

    def take_events(self) -> Iterable[Any]:
        return map(as_event, self._scheduler.take_events())

    def reset_cache(self) -> bool:
        self._scheduler.reset()
        return True

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        if self._role is KVConnectorRole.SCHEDULER:
            self._scheduler.close()


if can_have_groups(vllm_version):
    # Several groups of caches then stay several. Before, vLLM has all layers keep all tokens in one group.
    from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

    SupportsHMA.register(LWKVConnector)


def _make_scheduler(
    settings: Settings, vllm_config: Any, kv_cache_config: Any
) -> SchedulerSide | HybridScheduler:
    config, transfer = settings, vllm_config.kv_transfer_config
    role = Role(loads=transfer.is_kv_consumer, stores=transfer.is_kv_producer)
    if several_groups.has_groups(kv_cache_config, vllm_version):
        return several_groups.make_scheduler(settings, vllm_config, kv_cache_config, role)
    group = only_group(kv_cache_config)
    log_one_group(group, vllm_version)
    ranks = vllm_config.parallel_config.world_size
    below = partial(open_lower_tiers, config) if tier_urls(config) else None
    timeout_s = config.extra_config.host_memory_timeout_s
    index = ChunkIndex(ranks, config.chunk_size, config.save_unfull_chunk, below)
    return SchedulerSide(
        config,
        role,
        index,
        block_size=group.kv_cache_spec.block_size,
        num_ranks=ranks,
        window=window_of(group),
        events=KVEventLog(config.chunk_size) if _announces(vllm_config) else None,
        most_decoded=1 + _most_drafts(vllm_config),
        compares_costs=settings.load_when == "cheaper",
        prefetches=settings.prefetch_waiting and bool(tier_urls(config)),
        make_blending=partial(make_planner, settings, vllm_config, group)
        if settings.enable_blending
        else None,
        owner=OwnerPromises(config.host_memory, timeout_s) if config.host_memory else None,
    )


def _most_drafts(vllm_config: Any) -> int:
    """Draft tokens of a request in one step."""
    return int(getattr(vllm_config.speculative_config, "num_speculative_tokens", None) or 0)


def _announces(vllm_config: Any) -> bool:
    """Whether vLLM publishes what comes to its KV cache and goes."""
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def _why_rows(settings: Settings) -> str | None:
    """The setting for which single tokens must be found in vLLM's blocks; None if whole blocks are enough."""
    if settings.enable_blending:
        return "enable_blending"
    return f"page_codec={settings.page_codec}" if settings.page_codec in ("lossless", "fp8") else None


def _make_worker(
    settings: Settings, vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]
) -> WorkerSide | HybridWorker:
    tp, pp = get_tp_group(), get_pp_group()
    rank = Rank(tp.rank_in_group, tp.world_size, pp.rank_in_group, pp.world_size)
    if rank.number == 0 and (whole := get_current_vllm_config_or_none()) is not None:
        warn_of_outer_policy(whole.kv_transfer_config, vllm_config.kv_transfer_config, settings)
    if several_groups.has_groups(kv_cache_config, vllm_version):
        return several_groups.make_worker(
            settings, vllm_config, kv_cache_config, kv_caches, rank, vllm_version
        )
    caches, metadata, hints = describe(
        vllm_config, kv_cache_config, kv_caches, rank, vllm_version, _why_rows(settings)
    )
    device = next(iter(kv_caches.values())).device
    # vLLM captures its graphs after this, and page-locking would end a capture: see WorkerSide.introduce.
    engine = CacheEngine.create(
        settings,
        metadata,
        caches,
        layout_hints=hints,
        platform=platform_for(device),
        lock_memory=False,
    )
    if settings.load_when == "cheaper":
        engine.parts().storage.lower.read_back_first()
    block_size = only_group(kv_cache_config).kv_cache_spec.block_size
    fails = settings.on_load_failure == "fail"
    blending = None
    if settings.enable_blending:
        with ExitStack() as undo:
            undo.callback(engine.close)  # for a model that is refused
            blending = make_blend_worker(engine, settings, vllm_config, kv_cache_config, Ranks(tp))
            undo.pop_all()
    drafts = draft_layers(vllm_config, caches)
    return WorkerSide(engine, rank.number, block_size, drafts, fails, blending=blending)
