"""What an engine says of its caches beside registering them."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypedDict

from lwkv.errors import ConfigError
from lwkv.layout import KVSpec

ENGINES = ("vllm", "sglang")
_WORDS = {"block_size": "a whole number", "specs": "a KVSpec for each layer name"}


class LayoutHints(TypedDict, total=False):
    """What a registered tensor's shape cannot say; see `lwkv.layout.describe_layers`.

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
    for name, value in hints.items():
        _check_name(name)
        if not _is_right(name, value):
            words = _WORDS.get(name, "text")
            raise ConfigError(f"layout_hints[{name!r}] is {value!r}; it must be {words}")
    if "specs" in hints:
        if "block_size" in hints:
            raise ConfigError("layout_hints has specs, each with its block_size: leave block_size out")
    elif engine == "vllm" and "block_size" not in hints:
        raise ConfigError('layout_hints["block_size"] is missing: give the tokens of a block of the caches')
    return {"block_size": 1, **hints}


def _check_name(name: str) -> None:
    names = LayoutHints.__annotations__
    if name not in names:
        near = get_close_matches(name, names, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"no layout hint {name!r}; there are {', '.join(names)}{hint}")


def _is_right(name: str, value: object) -> bool:
    if name != "specs":
        return type(value) is int if name == "block_size" else isinstance(value, str)
    return isinstance(value, Mapping) and {KVSpec} == set(map(type, value.values()))
