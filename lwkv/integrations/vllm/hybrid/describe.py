"""From what vLLM registers to the groups of caches that a hybrid engine moves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from lwkv.errors import ConfigError
from lwkv.hybrid import Group
from lwkv.integrations.vllm.hybrid.groups import CacheGroups
from lwkv.integrations.vllm.worker.caches import Rank, describe
from lwkv.kinds import Kind
from lwkv.metadata import CacheMetadata

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
        ConfigError: layers that are in no group, caches that cannot be moved, or no layer of attention.
    """
    every = kv_cache_config.kv_cache_groups
    _require_all(caches, {name for group in every for name in group.layer_names})
    found: dict[int, Group] = {}
    for group_number, (kind, group) in enumerate(zip(groups.kind_of, every, strict=True)):
        if groups.kinds[kind].form != "state":
            own = {name: caches[name] for name in group.layer_names}
            alone = SimpleNamespace(num_blocks=kv_cache_config.num_blocks, kv_cache_groups=[group])
            described = describe(vllm_config, alone, own, rank, version)
            found[group_number] = Group(kind, described.caches, described.hints, described.metadata)
    if not found:
        raise ConfigError("no layer of this model keeps keys and values: leave lwkv out for it")
    model = next(iter(found.values())).metadata
    for group_number, (kind, group) in enumerate(zip(groups.kind_of, every, strict=True)):
        if group_number not in found:
            own = {name: caches[name] for name in group.layer_names}
            found[group_number] = _states(kind, groups.kinds[kind], own, model, version)
    return [found[group_number] for group_number in range(len(every))]


def _states(
    kind_number: int, kind: Kind, caches: Mapping[str, torch.Tensor], model: CacheMetadata, version: str
) -> Group:
    """A group of layers that keep states. What their bytes mean only the same release of vLLM knows."""
    rows = {name: _rows(name, cache, kind.block_bytes) for name, cache in caches.items()}
    own = replace(
        model,
        num_layers=len(rows),
        num_kv_heads=1,
        head_size=1,
        kv_dtype=torch.uint8,
        use_mla=False,
        revision=f"{model.revision} states of vLLM {version}",
    )
    return Group(kind_number, rows, {}, own)


def _rows(name: str, cache: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """The state of each block, uint8 (blocks, bytes), without what pads it. Raises ConfigError."""
    is_known = isinstance(cache, torch.Tensor) and cache.dim() > 1 and cache[0].is_contiguous()
    if not is_known or cache[0].numel() * cache.element_size() < num_bytes:
        is_one = isinstance(cache, torch.Tensor)
        got = f"{tuple(cache.shape)} {cache.dtype}" if is_one else type(cache).__name__
        raise ConfigError(
            f"layer {name!r} keeps states of {num_bytes} bytes in {got}; one tensor was expected, each block "
            "of which is contiguous: leave lwkv out for this model"
        )
    blocks = cache.flatten(1) if cache.dim() > 2 else cache
    return blocks.view(torch.uint8)[:, :num_bytes]


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
