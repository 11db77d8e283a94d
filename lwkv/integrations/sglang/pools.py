"""From SGLang's KV pools to what lwkv must know of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lwkv.connectors import LayoutHints
from lwkv.errors import ConfigError
from lwkv.layouts.layout import KVSpec
from lwkv.layouts.registration import Registered
from lwkv.metadata import CacheMetadata

MHA, MLA = "MHATokenToKVPool", "MLATokenToKVPool"
ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
"""SGLang's speculative decoding where drafts have a KV pool of their own on the model's slots, or none."""
_MODEL = ("quantization", "dtype", "kv_cache_dtype", "quantization_param_path", "json_model_override_args")
_DRAFT = (
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_model_quantization",
    "speculative_draft_kv_cache_dtype",
)


class Rank(NamedTuple):
    """Where a worker stands among those of its model."""

    tp: int = 0
    tp_size: int = 1


class Description(NamedTuple):
    """What an engine is made of.

    `num_layers` is the number of the target model's layers; those of a draft model come behind them.
    """

    caches: dict[str, Registered]
    metadata: CacheMetadata
    hints: LayoutHints
    num_layers: int


def describe(pool: Any, drafts: Sequence[Any], server_args: Any, rank: Rank) -> Description:
    """Describe the pool of the target model, and those of draft models that share its slots.

    Raises:
        ConfigError: a pool that lwkv cannot move, by its class or layout.
    """
    caches: dict[str, Registered] = {}
    specs: dict[str, KVSpec] = {}
    counts: list[int] = []
    for prefix, each in (("layer", pool), *((f"draft_{i}_layer", draft) for i, draft in enumerate(drafts))):
        tensors, spec = _read(each)
        counts.append(len(tensors))
        names = [f"{prefix}_{number}" for number in range(len(tensors))]
        caches |= zip(names, tensors, strict=True)
        specs |= dict.fromkeys(names, spec)
    first = specs["layer_0"]
    metadata = CacheMetadata(
        model=str(server_args.model_path),
        num_layers=len(caches),
        num_kv_heads=first.num_kv_heads,
        head_size=first.head_size,
        dtype=pool.dtype,
        kv_dtype=pool.dtype,
        revision=_revision(server_args, counts[1:]),
        use_mla=first.use_mla,
        tp_size=rank.tp_size,
        tp_rank=rank.tp,
    )
    return Description(caches, metadata, {"specs": specs}, counts[0])


def refuse_components(components: Sequence[str]) -> None:
    """Raise ConfigError for trees of other state than that of full attention."""
    others = sorted(set(components) - {"FULL"})
    if others:
        raise ConfigError(
            f"this model keeps {', '.join(others)} beside full attention; lwkv in SGLang moves FULL only: "
            "run it without an external linker"
        )


def refuse_algorithm(algorithm: str | None) -> None:
    """Raise ConfigError for speculative decoding that may keep its drafts where lwkv does not see them."""
    if algorithm and algorithm.upper() not in ALGORITHMS:
        raise ConfigError(
            f"speculative_algorithm: got {algorithm}; beside lwkv SGLang may have {', '.join(ALGORITHMS)}: "
            "choose one of these, or run it without an external linker"
        )


def _read(pool: Any) -> tuple[list[Registered], KVSpec]:
    """The layers of one pool, and what is in each of them."""
    kind = type(pool).__name__
    if kind == MHA:
        return _read_mha(pool)
    if kind == MLA:
        return _read_mla(pool)
    raise ConfigError(f"SGLang's pool {kind} is not supported; lwkv moves {MHA} and {MLA}")


def _read_mha(pool: Any) -> tuple[list[Registered], KVSpec]:
    layout = str(getattr(pool, "kv_cache_layout", "nhd"))
    if layout not in _LAYOUTS:
        raise ConfigError(f"KV cache layout {layout!r} is not supported; lwkv moves {', '.join(_LAYOUTS)}")
    _refuse_scales(pool, "k_scale_buffer")
    k, v = pool.k_buffer[0], pool.v_buffer[0]
    if k.shape != v.shape:
        raise ConfigError(
            f"K and V differ: {tuple(k.shape)} and {tuple(v.shape)}; lwkv moves heads of one size"
        )
    return list(zip(pool.k_buffer, pool.v_buffer, strict=True)), _LAYOUTS[layout](k)


def _spec_of_nhd(k: torch.Tensor) -> KVSpec:
    """Of a layer's K (slots, heads, elements)."""
    return KVSpec(int(k.shape[1]), int(k.shape[2]), 1)


def _spec_of_hnd(k: torch.Tensor) -> KVSpec:
    """Of a layer's K (pages, heads, tokens of a page, elements)."""
    return KVSpec(int(k.shape[1]), int(k.shape[3]), int(k.shape[2]))


_LAYOUTS: dict[str, Callable[[torch.Tensor], KVSpec]] = {"nhd": _spec_of_nhd, "hnd": _spec_of_hnd}
"""SGLang's names of layouts of K and V; each reads the sizes from a layer's K. Others are refused."""


def _read_mla(pool: Any) -> tuple[list[Registered], KVSpec]:
    _refuse_scales(pool, "kv_scale_buffer")
    for name in ("use_dsa", "layer_shard_enabled", "dcp_replicated"):
        if getattr(pool, name, False):
            raise ConfigError(f"SGLang's pool {MLA} with {name} is not supported")
    return list(pool.kv_buffer), KVSpec(1, int(pool.kv_buffer[0].shape[-1]), 1, use_mla=True)


def _refuse_scales(pool: Any, name: str) -> None:
    if getattr(pool, "is_quantized_kv_cache", False) or getattr(pool, name, None) is not None:
        raise ConfigError(
            f"{type(pool).__name__} keeps scales beside its {pool.dtype} rows, which lwkv does not move: "
            "choose --kv-cache-dtype auto or fp8_e4m3"
        )


def _revision(server_args: Any, draft_layers: Sequence[int]) -> str:
    """What else the bytes of a prompt depend on: weights, how they are read and used, whose layers are whose.

    Args:
        draft_layers: how many layers each draft pool has.
    """
    revision = str(getattr(server_args, "revision", None) or "")
    names = (*_MODEL, *_DRAFT) if getattr(server_args, "speculative_algorithm", None) else _MODEL
    values = {name: value for name in names if (value := getattr(server_args, name, None))}
    if draft_layers:
        # A page of the target and its drafts is never one of a target with as many layers.
        values["draft_layers"] = list(draft_layers)
    return f"{revision} {json.dumps(values, sort_keys=True, default=str)}".strip()


def device_of(description: Description) -> torch.device:
    """Where the caches are."""
    first = next(iter(description.caches.values()))
    tensor = first if isinstance(first, torch.Tensor) else first[0]
    return tensor.device
