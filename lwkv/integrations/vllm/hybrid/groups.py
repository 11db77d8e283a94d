"""From vLLM's groups of caches to the kinds of caches that lwkv keeps apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from lwkv.errors import ConfigError
from lwkv.integrations.vllm.worker.caches import layer_specs
from lwkv.kinds import ChunkSize, Kind, choose_chunk_size
from lwkv.kinds.kind import Form
from lwkv.kinds.words import boundary_bytes, describe_kind, token_bytes

FORMS: dict[str, Form] = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "ChunkedLocalAttentionSpec": "local",
    "MambaSpec": "state",
}
"""vLLM's specs of the layers that can be cached beside others, by their class."""
SPANS = {"window": "sliding_window", "local": "attention_chunk_size"}
"""Where vLLM's specs have the tokens that a layer looks back."""

TRIED_STATES = ("SHORT_CONV", "GDN_ATTN")
"""vLLM's backends of layers that keep states which are cached: short convolutions and gated delta nets."""

ALL_TOKENS = -1
"""Tokens of one state in vLLM's spec of layers that keep one state for a prompt."""

ONE_GROUP = (
    "start vLLM with --disable-hybrid-kv-cache-manager, which has all layers of attention keep all tokens in "
    "one group"
)


@dataclass(frozen=True)
class CacheGroups:
    """What a model keeps.

    Attributes:
        kinds: in the order in which vLLM's groups have them first; their layers are those of one rank.
        kind_of: for each of vLLM's groups the number of its kind.
        chunk_size: for all kinds.
    """

    kinds: tuple[Kind, ...]
    kind_of: tuple[int, ...]
    chunk_size: ChunkSize

    @cached_property
    def most_looked_back(self) -> int:
        """Tokens of the widest window; 0 where there is none."""
        return max(kind.span for kind in self.kinds)

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state, which stands for all tokens before it."""
        return any(kind.form == "state" for kind in self.kinds)

    @cached_property
    def state_worth(self) -> int:
        """Tokens of which full attention keeps as many bytes as the states after one token."""
        full = sum(token_bytes(kind) for kind in self.kinds if kind.form == "full")
        states = sum(boundary_bytes(kind) for kind in self.kinds if kind.form == "state")
        return math.ceil(states / full) if full else 0

    def words(self) -> str:
        """What is kept, in one sentence for the log."""
        kinds = "; ".join(f"{kind.name}: {describe_kind(kind)}" for kind in self.kinds)
        size, why = self.chunk_size, ""
        if self.has_states and size.tokens < size.configured:
            why = ", and vLLM's steps end at a multiple of that, where states are found"
        return (
            f"this model has {len(self.kind_of)} groups of {len(self.kinds)} kinds of KV caches. {kinds}. "
            f"{size.words()}{why}"
        )


def read_groups(
    kv_cache_config: Any, chunk_size: int, caches: Mapping[str, torch.Tensor] | None = None
) -> CacheGroups:
    """Read vLLM's groups.

    Args:
        chunk_size: as it is configured.
        caches: of a worker; layers that share the KV of another one then do not count.

    Raises:
        ConfigError: layers that keep what cannot be cached, by name, with what to do.
    """
    groups = kv_cache_config.kv_cache_groups
    for group_number, group in enumerate(groups):
        _refuse_group(kv_cache_config, group_number, group)
    kinds = [_kind(group, caches) for group in groups]
    layers = Counter[Kind]()
    for kind in kinds:
        layers[replace(kind, num_layers=1)] += kind.num_layers
    merged = tuple(replace(kind, num_layers=num_layers) for kind, num_layers in layers.items())
    numbers = {kind: kind_number for kind_number, kind in enumerate(layers)}
    alignment = getattr(kv_cache_config, "cache_hit_alignment_tokens", None) or 1
    size = choose_chunk_size(chunk_size, [kind.block_size for kind in merged], alignment)
    if any(kind.form == "state" for kind in merged):
        # A state is there where a step of vLLM's ends: at a multiple of this, seldom of more.
        size = replace(size, tokens=size.unit)
    return CacheGroups(merged, tuple(numbers[replace(kind, num_layers=1)] for kind in kinds), size)


def _kind(group: Any, caches: Mapping[str, torch.Tensor] | None) -> Kind:
    (spec, *_) = layer_specs(group).values()
    form = FORMS[type(spec).__name__]
    own = group.layer_names if caches is None else {caches[name].data_ptr() for name in group.layer_names}
    dtypes = spec.dtypes if form == "state" else (spec.dtype,)
    return Kind(
        form,
        int(spec.block_size),
        len(own),
        int(spec.real_page_size_bytes),
        tuple(str(dtype).removeprefix("torch.") for dtype in dtypes),
        span=int(getattr(spec, SPANS[form])) if form in SPANS else 0,
        tag=f"{_backend(spec)} {spec.shapes}" if form == "state" else "",
    )


def _refuse_group(kv_cache_config: Any, group_number: int, group: Any) -> None:
    """Raise ConfigError for a group that cannot be cached beside others."""
    specs = layer_specs(group)
    for kind in dict.fromkeys(type(spec).__name__ for spec in specs.values()):
        if kind not in FORMS:
            names = [name for name, spec in specs.items() if type(spec).__name__ == kind]
            raise ConfigError(
                f"{_shown(names)} keep a {kind}, which lwkv does not cache; leave lwkv out for this model"
                + (f", or {ONE_GROUP}" if hasattr(specs[names[0]], "num_kv_heads") else "")
            )
    advice = f"{ONE_GROUP}, or " if all(hasattr(spec, "num_kv_heads") for spec in specs.values()) else ""
    for what in _peculiarities(kv_cache_config, group_number, group):
        raise ConfigError(
            f"{_shown(group.layer_names)} {what}, which lwkv does not cache beside other groups of caches; "
            f"{advice}leave lwkv out for this model"
        )


def _peculiarities(kv_cache_config: Any, group_number: int, group: Any) -> list[str]:
    """What is not handled of a group whose layers are of known kinds."""
    specs = list(layer_specs(group).values())
    (first, *_) = specs
    cacheable = getattr(kv_cache_config, "prefix_cacheable_group_ids", None)
    found = {
        "differ within one group": any(spec != first for spec in specs),
        "are of a draft model": getattr(group, "is_eagle_group", False),
        "are in host memory": getattr(group, "host_resident", False),
        "hold what is not found again": cacheable is not None and group_number not in cacheable,
        "keep tokens behind their window": bool(getattr(first, "extra_retained_tokens", 0)),
        "look at tokens of their own part of a prompt alone": bool(
            FORMS[type(first).__name__] != "local" and getattr(first, "attention_chunk_size", None)
        ),
        "keep one row for several tokens": getattr(first, "tokens_per_state", 1) not in (1, ALL_TOKENS),
        "keep states that vLLM does not find again (start it with --enable-prefix-caching)": (
            getattr(first, "mamba_cache_mode", "align") != "align"
        ),
        f"keep states of {_backend(first)}, which lwkv was not tried with": (
            _backend(first) not in ("", *TRIED_STATES)
        ),
        "keep several states in a step (as speculative decoding needs)": bool(
            getattr(first, "num_speculative_blocks", 0) or getattr(first, "num_prefill_checkpoint_blocks", 0)
        ),
    }
    return [what for what, is_so in found.items() if is_so]


def _backend(spec: Any) -> str:
    """vLLM's name of what computes a layer's states; empty for attention."""
    backend = getattr(spec, "mamba_type", "")
    return str(getattr(backend, "name", backend))


def _shown(names: Sequence[str]) -> str:
    """Layers by name, the first ones of many."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"layers {', '.join(map(repr, names[:3]))}{more}"
