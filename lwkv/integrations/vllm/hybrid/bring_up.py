"""Makes both halves for a model with several groups of caches, from vLLM's configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from lwkv.hybrid import HybridEngine
from lwkv.integrations.vllm.hybrid.describe import describe_groups
from lwkv.integrations.vllm.hybrid.groups import read_groups
from lwkv.integrations.vllm.hybrid.refusals import can_have_groups, refuse
from lwkv.integrations.vllm.hybrid.scheduler import HybridScheduler
from lwkv.integrations.vllm.hybrid.worker import HybridWorker
from lwkv.integrations.vllm.scheduler.side import Role
from lwkv.integrations.vllm.settings import Settings
from lwkv.integrations.vllm.worker.caches import Rank
from lwkv.platforms import platform_for

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
    return HybridScheduler(
        groups,
        role,
        vllm_config.parallel_config.world_size,
        settings.save_decode_cache,
        settings.load_timeout_s,
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
    return HybridWorker(engine, rank.number)
