"""A cache engine beside the reference engine."""

from __future__ import annotations

from collections.abc import Sequence

from lwkv.config.settings import Config
from lwkv.engine import CacheEngine
from lwkv.metadata import CacheMetadata
from lwkv.platforms import Platform
from lwkv.reference.cache import PagedCache
from lwkv.reference.model.llama import Model
from lwkv.storage import Tier
from lwkv.telemetry.timeline import Timeline


def describe_model(model: Model, name: str) -> CacheMetadata:
    """Give what decides the bytes of a model's KV; `name` stands for its weights."""
    shape = model.shape
    return CacheMetadata(
        model=name,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        dtype=model.dtype,
        rope=f"base {shape.rope_base}, part {shape.rotary_fraction}, scaling {shape.rope_scaling}",
    )


def open_cache_engine(
    config: Config,
    model: Model,
    cache: PagedCache,
    name: str,
    *,
    platform: str | Platform | None = None,
    tiers: Sequence[Tier] = (),
    timeline: Timeline | None = None,
) -> CacheEngine:
    """Make a cache engine on a paged cache; arguments as CacheEngine.create's. The caller closes it.

    A reference engine with `steps=LayerSteps(it)`, `lookup=it.lookup` and its chunk size uses it.
    """
    return CacheEngine.create(
        config,
        describe_model(model, name),
        cache.tensors,
        layout_hints={"block_size": cache.block_size, "layout": cache.layout},
        platform=platform,
        tiers=tiers,
        timeline=timeline,
    )
