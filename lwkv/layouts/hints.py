"""What an engine says of its caches beside registering them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from lwkv.config.messages import did_you_mean
from lwkv.errors import ConfigError
from lwkv.layouts.layout import KVSpec

ENGINES = ("vllm", "sglang")
_WORDS = {"block_size": "a whole number", "specs": "a KVSpec for each layer name"}


class LayoutHints(TypedDict, total=False):
    """What a registered tensor's shape cannot say; see `lwkv.layouts.layout.describe_layers`.

    `block_size`: tokens of a block, required for vllm, 1 for sglang unless given. `specs`: in its place, the
    KVSpec of each layer by name, where layers differ from each other. `layout`: a name of LAYOUTS, or
    "opaque" together with `opaque_tag`.
    """

    block_size: int
    specs: Mapping[str, KVSpec]
    layout: str
    opaque_tag: str


def check_hints(engine: str, hints: LayoutHints) -> LayoutHints:
    """Complete the hints. Raises ConfigError for an engine that is not known or a hint that cannot be."""
    if engine not in ENGINES:
        raise ConfigError(f"no engine {engine!r}; there are {', '.join(ENGINES)}")
    names = LayoutHints.__annotations__
    for name, value in hints.items():
        if name not in names:
            near = did_you_mean(name, names)
            raise ConfigError(f"no layout hint {name!r}; there are {', '.join(names)}{near}")
        if not _is_right(name, value):
            words = _WORDS.get(name, "text")
            raise ConfigError(f"layout_hints[{name!r}] is {value!r}; it must be {words}")
    if "specs" in hints and "block_size" in hints:
        raise ConfigError("layout_hints has specs, each with its block_size: leave block_size out")
    if engine == "vllm" and not {"specs", "block_size"} & set(hints):
        raise ConfigError('layout_hints["block_size"] is missing: give the tokens of a block of the caches')
    return {"block_size": 1, **hints}


def _is_right(name: str, value: object) -> bool:
    if name != "specs":
        return type(value) is int if name == "block_size" else isinstance(value, str)
    return isinstance(value, Mapping) and {KVSpec} == set(map(type, value.values()))
