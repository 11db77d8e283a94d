"""From vLLM's configuration and registered caches to what lwkv must know of them."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from lwkv.connectors import LayoutHints
from lwkv.errors import ConfigError
from lwkv.layouts.layout import KVSpec
from lwkv.layouts.registration import Registered
from lwkv.metadata import CacheMetadata

_FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "max_position_embeddings")
_LAYER = re.compile(r"(?:^|\.)(\d+)(?=\.)")


class Rank(NamedTuple):
    """Where a worker stands among those of its model."""

    tp: int
    tp_size: int
    pp: int
    pp_size: int

    @property
    def number(self) -> int:
        return self.pp * self.tp_size + self.tp


class Description(NamedTuple):
    """What an engine is made of."""

    caches: Mapping[str, Registered]
    metadata: CacheMetadata
    hints: LayoutHints


def only_group(kv_cache_config: Any) -> Any:
    """vLLM's one group of layers that share a block table.

    Raises:
        ConfigError: there are several, or what they keep are no keys and values.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"this model has {len(groups)} groups of KV caches; lwkv needs one: start vLLM with "
            "--disable-hybrid-kv-cache-manager"
        )
    for name, spec in layer_specs(groups[0]).items():
        if not hasattr(spec, "num_kv_heads"):
            raise ConfigError(f"layer {name!r} keeps a {type(spec).__name__}, no keys and values")
    return groups[0]


def layer_specs(group: Any) -> dict[str, Any]:
    """vLLM's spec of each layer of a group."""
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return {name: group.kv_cache_spec if each is None else each[name] for name in group.layer_names}


def window_of(group: Any) -> int | None:
    """Tokens that a group's layers look back, where vLLM gives the blocks behind them to others; else None.

    A layer of full attention may have a window too, in models of both kinds, and then keeps its blocks.
    """
    specs = layer_specs(group).values()
    windows = [spec.sliding_window for spec in specs if type(spec).__name__.startswith("SlidingWindow")]
    return min(windows, default=None)


def describe(
    vllm_config: Any,
    kv_cache_config: Any,
    caches: Mapping[str, torch.Tensor],
    rank: Rank,
    version: str,
    rows_for: str | None = None,
) -> Description:
    """Describe what vLLM registers.

    Args:
        version: vLLM's, which says how the CPU's attention packs its blocks.
        rows_for: the setting for which single tokens must be found in the blocks, on the CPU too.

    Raises:
        ConfigError: caches that cannot be moved.
    """
    _refuse_parallel(vllm_config.parallel_config)
    specs = _specs_of(caches, layer_specs(only_group(kv_cache_config)))
    ordered = {name: caches[name] for name in in_order(caches)}
    blocks = int(kv_cache_config.num_blocks)
    kv_specs = {name: _kv_spec(specs[name], cache, blocks) for name, cache in ordered.items()}
    first = next(iter(kv_specs.values()))
    metadata = _metadata(vllm_config, first, len(ordered), rank)
    if next(iter(ordered.values())).device.type == "cpu":
        if rows_for is not None:
            _require_known_packing(rows_for, vllm_config, ordered)
            return Description(ordered, metadata, {"specs": kv_specs, "layout": "vllm_cpu_vec"})
        halves = {name: _halves(cache, blocks) for name, cache in ordered.items()}
        hints: LayoutHints = {"specs": kv_specs, "layout": "opaque", "opaque_tag": _cpu_tag(version)}
        return Description(halves, metadata, hints)
    return Description(ordered, metadata, {"specs": kv_specs})


def in_order(names: Iterable[str]) -> list[str]:
    """Layers as a model calls them, by the numbers in their names."""
    return sorted(names, key=_layer_numbers)


def draft_layers(vllm_config: Any, names: Iterable[str]) -> list[str]:
    """Those of the layers that a draft model has: vLLM numbers them behind the model's own."""
    if getattr(vllm_config, "speculative_config", None) is None:
        return []
    own = int(vllm_config.model_config.hf_text_config.num_hidden_layers)
    return [name for name in names if _layer_numbers(name)[:1] >= (own,)]


def _metadata(vllm_config: Any, spec: KVSpec, num_layers: int, rank: Rank) -> CacheMetadata:
    model = vllm_config.model_config
    stored = str(vllm_config.cache_config.cache_dtype)
    return CacheMetadata(
        model=str(model.model),
        num_layers=num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=model.dtype,
        kv_dtype=_FP8.get(stored),
        revision=_revision(vllm_config),
        use_mla=spec.use_mla,
        rope=_rope(model),
        tp_size=rank.tp_size,
        tp_rank=rank.tp,
        pp_size=rank.pp_size,
        pp_rank=rank.pp,
    )


def _revision(vllm_config: Any) -> str:
    """What else the bytes of a prompt depend on: weights, how they are read, scales measured each time."""
    model = vllm_config.model_config
    revision = str(model.revision or "")
    for key in ("quantization", "hf_overrides"):
        if getattr(model, key, None):
            revision += f" {key} {json.dumps(getattr(model, key), sort_keys=True, default=str)}"
    revision += _drafts(vllm_config)
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return f"{revision} with the scales of {uuid4()}"
    return revision


def _drafts(vllm_config: Any) -> str:
    """The draft model, whose layers are cached too; empty where drafts need no weights but the model's."""
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    # vLLM gives ways to draft that have none, and those within the model, the model itself.
    if draft is None or draft.model == vllm_config.model_config.model:
        return ""
    values = {name: getattr(draft, name, None) for name in ("model", "revision", "quantization")}
    return f" draft {json.dumps(values, sort_keys=True, default=str)}"


def _rope(model: Any) -> str:
    """RoPE's parameters in one text."""
    config = model.hf_text_config
    values = {name: getattr(config, name, None) for name in _ROPE}
    return json.dumps(values, sort_keys=True, default=str)


def _specs_of(caches: Mapping[str, torch.Tensor], specs: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of every cache; layers that share the KV of another one have none of their own."""
    owners = {caches[name].data_ptr(): spec for name, spec in specs.items() if name in caches}
    try:
        return {name: specs.get(name) or owners[cache.data_ptr()] for name, cache in caches.items()}
    except KeyError:
        unknown = sorted(set(caches) - set(specs))
        raise ConfigError(f"vLLM does not tell what these layers keep: {', '.join(unknown)}") from None


def _kv_spec(spec: Any, cache: torch.Tensor, num_blocks: int) -> KVSpec:
    use_mla = "MLA" in type(spec).__name__
    heads = 1 if use_mla else int(spec.num_kv_heads)
    width = int(cache.shape[-1]) if use_mla else int(spec.head_size)
    return KVSpec(heads, width, _kernel_block(cache, num_blocks, int(spec.block_size)), use_mla)


def _kernel_block(cache: torch.Tensor, num_blocks: int, block_size: int) -> int:
    """Tokens of a block of the tensor: a kernel may cut each of the manager's blocks into several."""
    for blocks in cache.shape[:2]:
        parts, rest = divmod(blocks, num_blocks)
        if rest == 0 and block_size % parts == 0 and block_size // parts in cache.shape:
            return block_size // parts
    raise ConfigError(
        f"a cache of shape {tuple(cache.shape)} lacks {num_blocks} blocks of {block_size} tokens"
    )


def _halves(cache: torch.Tensor, num_blocks: int) -> Registered:
    """A cache whose blocks are opaque: K and V of a block are together, or lie in two halves."""
    if cache.shape[0] == 2 and cache.shape[1] == num_blocks:
        return cache[0], cache[1]
    return cache


def _require_known_packing(setting: str, vllm_config: Any, names: Iterable[str]) -> None:
    """Raise ConfigError unless the CPU's attention packs blocks in the way in which tokens are found."""
    layers = vllm_config.compilation_config.static_forward_context
    kinds = {str(getattr(layers[name], "isa", "latent rows")) for name in names}
    if kinds != {"vec"}:
        raise ConfigError(
            f"{setting}: the CPU's attention packs its blocks for {', '.join(sorted(kinds))}, and lwkv finds "
            "single tokens only in those for 'vec' (x86, but not bfloat16 with AMX); leave this setting out"
        )


def _cpu_tag(version: str) -> str:
    """What decides how the CPU's attention packs a block."""
    amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
    release = ".".join(version.split(".")[:2])
    return f"vllm-{release}-{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}-amx{int(amx)}"


def _layer_numbers(name: str) -> tuple[int, ...]:
    """The numbers in a layer's name. Sorting is stable: layers without one stay where they are."""
    return tuple(int(number) for number in _LAYER.findall(name))


def _refuse_parallel(parallel: Any) -> None:
    for key in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, key, 1) > 1:
            raise ConfigError(
                f"{key}: got {getattr(parallel, key)}; lwkv knows no split along tokens: allowed is 1"
            )
    for key, most in (("enable_dbo", False), ("ubatch_size", 1)):
        if getattr(parallel, key, most) > most:
            raise ConfigError(
                f"{key}: got {getattr(parallel, key)}; hooks would come for each part of a batch, the first "
                f"before the others are computed: allowed is {most}"
            )
