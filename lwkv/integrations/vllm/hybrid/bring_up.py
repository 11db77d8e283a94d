"""Makes both halves for a model with several groups of caches, from vLLM's configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from lwkv.hybrid import HybridEngine
from lwkv.integrations.vllm.hybrid.describe import describe_groups
from lwkv.integrations.vllm.hybrid.groups import CacheGroups, read_groups
from lwkv.integrations.vllm.hybrid.lower_hits import LowerHits
from lwkv.integrations.vllm.hybrid.rank_tiers import open_below
from lwkv.integrations.vllm.hybrid.refusals import can_have_groups, refuse, require_drafts
from lwkv.integrations.vllm.hybrid.scheduler import HybridScheduler
from lwkv.integrations.vllm.hybrid.worker import HybridWorker
from lwkv.integrations.vllm.scheduler.side import Role
from lwkv.integrations.vllm.settings import Settings
from lwkv.integrations.vllm.worker.caches import Rank, draft_layers, in_order
from lwkv.kinds import KindIndex
from lwkv.platforms import platform_for
from lwkv.storage.registry import tier_urls
from lwkv.telemetry.counters import Counters

log = logging.getLogger(__name__)


def has_groups(kv_cache_config: Any, version: str) -> bool:
    """Whether a model has several groups of caches that this vLLM can have loaded."""
    groups = getattr(kv_cache_config, "kv_cache_groups", ())
    return len(groups) > 1 and can_have_groups(version)


def make_scheduler(settings: Settings, vllm_config: Any, kv_cache_config: Any, role: Role) -> HybridScheduler:
    """The scheduler's half. Raises ConfigError for models and settings that are not handled."""
    groups = read_groups(kv_cache_config, settings.chunk_size)
    refuse(settings, vllm_config, groups.has_states)
    log.info("%s", groups.words())
    ranks = vllm_config.parallel_config.world_size
    return HybridScheduler(
        groups,
        role,
        ranks,
        settings.save_decode_cache,
        settings.load_timeout_s,
        make_lower_hits=partial(_make_lower_hits, settings, groups, ranks) if tier_urls(settings) else None,
    )


def _make_lower_hits(
    settings: Settings, groups: CacheGroups, num_ranks: int, index: KindIndex, counters: Counters
) -> LowerHits:
    return LowerHits(
        groups.kinds,
        groups.chunk_size.tokens,
        index,
        num_ranks,
        counters,
        settings.load_timeout_s,
        partial(open_below, settings),
        compares_costs=settings.load_when == "cheaper",
        layerwise=settings.use_layerwise and not groups.has_states,
    )


def make_worker(
    settings: Settings,
    vllm_config: Any,
    kv_cache_config: Any,
    caches: Mapping[str, torch.Tensor],
    rank: Rank,
    version: str,
) -> HybridWorker:
    """A worker's half. Raises ConfigError for models and settings that are not handled."""
    groups = read_groups(kv_cache_config, settings.chunk_size, caches)
    refuse(settings, vllm_config, groups.has_states)
    drafts = draft_layers(vllm_config, in_order(caches))
    require_drafts(vllm_config, drafts)
    described = describe_groups(vllm_config, kv_cache_config, caches, rank, version, groups)
    device = next(iter(caches.values())).device
    engine = HybridEngine(
        settings,
        groups.kinds,
        described,
        groups.chunk_size,
        platform=platform_for(device),
        # vLLM captures its graphs after this, and page-locking would end a capture: see `introduce`.
        lock_memory=False,
    )
    if engine.lower is not None and settings.load_when == "cheaper":
        engine.lower.read_back_first()
    own = [name for name in in_order(caches) if name not in drafts]
    return HybridWorker(engine, rank.number, settings.load_timeout_s, drafts=drafts, last_layer=own[-1])
