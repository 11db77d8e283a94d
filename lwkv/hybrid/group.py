"""One group of layers: what it registers, what moves it, and what its keys begin with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lwkv.config.settings import Config
from lwkv.connectors import CreateGPUConnector, LayoutHints, PagedConnector
from lwkv.errors import ConfigError
from lwkv.keys import make_namespace
from lwkv.kinds import Kind
from lwkv.layouts.layout import KVSpec
from lwkv.layouts.registration import Registered
from lwkv.metadata import CacheMetadata
from lwkv.platforms import Platform


@dataclass(frozen=True)
class Group:
    """Layers that share a block table.

    Args:
        kind: its number.
        caches: by layer, in the model's order. A state's are opaque: one tensor of bytes, uint8 or int8,
            (blocks, bytes of a state), with any stride between blocks.
        hints: as CacheEngine.create takes them; of no meaning for states.
        metadata: of the model and of these layers.
    """

    kind: int
    caches: Mapping[str, Registered]
    hints: LayoutHints
    metadata: CacheMetadata


def open_connector(
    config: Config, group: Group, kind: Kind, page_bytes: int, platform: Platform
) -> PagedConnector:
    """The connector of a group, whose chunks are pieces of `config.chunk_size` slots.

    Raises:
        ConfigError: its pages are larger than `page_bytes`: the kind does not describe these caches.
        LayoutError: as describe_layers.
    """
    hints = _opaque(group.caches) if kind.form == "state" else group.hints
    connector = CreateGPUConnector(config, group.metadata, "vllm", hints, platform)
    connector.register(group.caches)
    if connector.page_bytes > page_bytes:
        raise ConfigError(
            f"layer {connector.layers[0].name!r}: a page needs {connector.page_bytes} bytes, pages have "
            f"{page_bytes}: Kind.block_bytes, {kind.block_bytes}, is too small for these caches"
        )
    return connector


def namespace_of(group: Group, kind: Kind, chunk_size: int, page_format: str) -> str:
    """What the keys of a group's pieces begin with: all that changes their bytes."""
    registered = group.metadata.as_registered([_first(cache).dtype for cache in group.caches.values()])
    return make_namespace(registered, chunk_size, f"{page_format}; {kind.key_part}", [*group.caches])


def kind_namespace(group: Group, kind: Kind, chunk_size: int, pieces: Sequence[str], page_bytes: int) -> str:
    """What the keys of a kind's chunks begin with in lower tiers.

    Args:
        group: one of the kind's. pieces: the namespaces of all pieces of all groups of the kind, in order.
    """
    registered = group.metadata.as_registered([_first(cache).dtype for cache in group.caches.values()])
    return make_namespace(registered, chunk_size, f"{kind.key_part}; pages of {page_bytes}", pieces)


def chain_name(metadata: CacheMetadata, kinds: Sequence[Kind], chunk_size: int) -> str:
    """A namespace of what all ranks and groups have in common, for the hashes of their chunks."""
    common = CacheMetadata(
        metadata.model, 1, 1, 1, metadata.dtype, revision=metadata.revision, rope=metadata.rope
    )
    return make_namespace(common, chunk_size, "chain", [f"{kind.name}/{kind.block_size}" for kind in kinds])


def _opaque(caches: Mapping[str, Registered]) -> LayoutHints:
    """A state is a block of one slot."""
    specs = {name: KVSpec(1, int(_first(cache).shape[-1]), 1) for name, cache in caches.items()}
    return {"specs": specs, "layout": "opaque", "opaque_tag": "state"}


def _first(cache: Registered) -> Any:
    return cache[0] if isinstance(cache, tuple | list) else cache
