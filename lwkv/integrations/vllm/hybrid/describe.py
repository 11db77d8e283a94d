"""From what vLLM registers to the groups of caches that a hybrid engine moves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from lwkv.errors import ConfigError
from lwkv.hybrid import Group
from lwkv.integrations.vllm.hybrid.groups import CacheGroups
from lwkv.integrations.vllm.worker.caches import Rank, describe

log = logging.getLogger(__name__)


def describe_groups(
    vllm_config: Any,
    kv_cache_config: Any,
    caches: Mapping[str, torch.Tensor],
    rank: Rank,
    version: str,
    groups: CacheGroups,
) -> list[Group]:
    """Describe vLLM's groups, in its order. Several of them lie at the same addresses, block by block.

    Raises:
        ConfigError: layers that are in no group, or caches that cannot be moved.
    """
    every = kv_cache_config.kv_cache_groups
    _require_all(caches, {name for group in every for name in group.layer_names})
    found = []
    for kind, group in zip(groups.kind_of, every, strict=True):
        own = {name: caches[name] for name in group.layer_names}
        alone = SimpleNamespace(num_blocks=kv_cache_config.num_blocks, kv_cache_groups=[group])
        described = describe(vllm_config, alone, own, rank, version)
        found.append(Group(kind, described.caches, described.hints, described.metadata))
    return found


def _require_all(caches: Mapping[str, torch.Tensor], grouped: set[str]) -> None:
    """Raise ConfigError where groups and caches do not fit.

    Layers that look at the KV of an earlier one are in no group, and have its memory: they keep nothing.
    """
    addresses = {caches[name].data_ptr() for name in grouped & caches.keys()}
    sharing = {name for name in caches.keys() - grouped if caches[name].data_ptr() in addresses}
    if sharing:
        log.info("layers that look at the KV of earlier ones keep nothing: %s", ", ".join(sorted(sharing)))
    if unknown := sorted((caches.keys() ^ grouped) - sharing):
        raise ConfigError(
            f"vLLM has registered other layers than it has in groups of KV caches: {', '.join(unknown)}"
        )
