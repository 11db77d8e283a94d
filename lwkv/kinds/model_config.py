"""The kinds of caches that a model's configuration says it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lwkv.errors import ConfigError
from lwkv.kinds.kind import Form, Kind

ATTENTION: dict[str, Form] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "local",
}
"""Names of Hugging Face's for layers of attention."""
SPANS = {"window": "sliding_window", "local": "attention_chunk_size"}
KEEP_NOTHING = ("mlp", "moe")
"""Names for layers without attention and states."""
UNLIKE = ("global_head_dim", "num_global_key_value_heads", "kv_lora_rank")
"""Fields of models whose layers do not all keep K and V of the same heads."""
STATES = {"conv": "conv_L_cache", "linear_attention": "linear_key_head_dim"}
"""Names of Hugging Face's for layers whose states are cached, each with a field that such models have: short
convolutions and gated delta nets."""


class UnknownLayersError(ConfigError):
    """A configuration does not say what its model's layers keep."""


@dataclass(frozen=True)
class ModelKinds:
    """What a model keeps.

    Attributes:
        kinds: of its attention, in the order in which layers have them first, with all heads.
        others: by their name, how many layers keep something else, such as states.
        not_cached: those of `others` whose states are not cached, as far as the configuration says.
    """

    kinds: tuple[Kind, ...]
    others: dict[str, int]
    not_cached: tuple[str, ...] = ()


def read_model(config: Any, block_size: int) -> ModelKinds:
    """The kinds of a model whose layers of attention have the same heads.

    Args:
        config: of its text, as transformers has it. block_size: tokens of the engine's blocks.

    Raises:
        UnknownLayersError: it does not say what its layers keep.
        ConfigError: they keep what is not cached, or `block_size` is below 1.
    """
    for name in ("num_hidden_layers", "num_attention_heads"):
        if getattr(config, name, None) is None:
            raise ConfigError(f"{name}: there is none, so its layers keep no K and V; leave lwkv out")
    if getattr(config, "index_head_dim", None):
        raise ConfigError(
            f"index_head_dim: got {config.index_head_dim}; rows of an indexer beside those of attention, of "
            "another dtype, are not cached; leave lwkv out"
        )
    for name in UNLIKE:
        if getattr(config, name, None):
            raise UnknownLayersError(
                f"{name}: got {getattr(config, name)!r}; what layers of such a model keep is known when the "
                "engine starts, and logged then"
            )
    layers = Counter(_layer_types(config))
    kinds = [_kind(config, name, count, block_size) for name, count in layers.items() if name in ATTENTION]
    others = {name: count for name, count in layers.items() if name not in ATTENTION}
    not_cached = [name for name in others if getattr(config, STATES.get(name, ""), None) is None]
    return ModelKinds(tuple(kinds), others, tuple(not_cached))


def _layer_types(config: Any) -> Iterator[str]:
    """What each layer is; those that use the KV of another one keep nothing."""
    num_kept = int(config.num_hidden_layers) - int(getattr(config, "num_kv_shared_layers", None) or 0)
    names = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if names is None:
        windows = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        names = ["sliding_attention" if windows else "full_attention"] * num_kept
    yield from (name for name in names[:num_kept] if name not in KEEP_NOTHING)


def _kind(config: Any, name: str, num_layers: int, block_size: int) -> Kind:
    form = ATTENTION[name]
    span = int(getattr(config, SPANS[form], None) or 0) if form in SPANS else 0
    dtype = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    row = 2 * heads * head_size * (4 if dtype == "float32" else 2)
    return Kind(form, block_size, num_layers, block_size * row, (dtype,), span)
