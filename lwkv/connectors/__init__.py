"""How pages get into an engine's cache and out of it; `CreateGPUConnector` picks the way."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import UnionType

from lwkv.config.settings import Config
from lwkv.connectors.buffer import BufferConnector
from lwkv.connectors.paged import PagedConnector
from lwkv.connectors.rope import Rope
from lwkv.errors import ConfigError
from lwkv.layouts.hints import LayoutHints, check_hints
from lwkv.layouts.layout import KVSpec, describe_layers
from lwkv.metadata import CacheMetadata
from lwkv.platforms import Platform, detect_platform, platforms_with

__all__ = ["BufferConnector", "CreateGPUConnector", "LayoutHints", "PagedConnector", "Rope"]


def CreateGPUConnector(
    config: Config,
    metadata: CacheMetadata,
    engine: str = "vllm",
    layout_hints: LayoutHints | None = None,
    platform: str | Platform | None = None,
) -> PagedConnector:
    """Make the connector that `config` asks for; it is the same for every platform that can do it.

    Args:
        metadata: heads and head size of the caches that will be registered, unless the hints have `specs`.
        engine: "vllm" or "sglang"; they differ in their layouts only.
        layout_hints: see LayoutHints.
        platform: a name, a platform, or None to detect it.

    Returns:
        A BufferConnector with `enable_blending`, else a PagedConnector. Whether it is driven layer by layer
        (`use_layerwise`) or drained at once is the caller's step, not another connector.

    Raises:
        ConfigError (a ValueError): an argument of another type, an engine or hint that is not known, or a
            platform that lacks what `config` asks for.
        PlatformError (a ValueError): HPU, or a platform that is not known.
        PlatformMissingError (a RuntimeError): a known platform that is not there.
    """
    _require_type("config", config, Config, "Config(...)")
    _require_type("metadata", metadata, CacheMetadata, "CacheMetadata(...)")
    _require_type("layout_hints", layout_hints, Mapping | None, '{"block_size": 16}')
    chosen = detect_platform(platform) if isinstance(platform, str | None) else platform
    _require_features(config, chosen)
    hints = check_hints(engine, layout_hints or {})
    spec = hints.get("specs") or KVSpec(
        metadata.num_kv_heads, metadata.head_size, hints["block_size"], metadata.use_mla
    )
    layout, opaque_tag = hints.get("layout"), hints.get("opaque_tag")
    kind = BufferConnector if config.enable_blending else PagedConnector
    return kind(config, chosen, partial(describe_layers, spec=spec, layout=layout, opaque_tag=opaque_tag))


def _require_type(name: str, value: object, wanted: type | UnionType, example: str) -> None:
    if not isinstance(value, wanted):
        raise ConfigError(f"{name} is {value!r}, of type {type(value).__name__}: pass {example}")


def _require_features(config: Config, platform: Platform) -> None:
    for flag, feature in (("use_layerwise", "layerwise"), ("enable_blending", "blending")):
        if getattr(config, flag) and not getattr(platform.features, feature):
            others = platforms_with(feature)
            raise ConfigError(
                f"{flag} is not supported on platform {platform.name!r}, only on {', '.join(others)}: "
                f"set {flag} to false, or run there"
            )
