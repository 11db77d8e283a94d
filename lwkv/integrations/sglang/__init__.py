"""lwkv as an external linker of SGLang: `"linker_module_path": "lwkv.integrations.sglang"`.

SGLang makes one linker in each worker, which asks it what is cached, has it load and store, and whose KV pool
waits for every layer. Only `linker.py` and `statistics.py` know SGLang's classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lwkv.integrations.sglang.linker import LWKVLinker

__all__ = ["LWKVLinker"]


def __getattr__(name: str) -> object:
    # SGLang takes the class from here; the parts beside it can be used, and tested, without SGLang.
    if name == "LWKVLinker":
        from lwkv.integrations.sglang.linker import LWKVLinker

        return LWKVLinker
    raise AttributeError(f"{__name__} has no {name!r}; it has {', '.join(__all__)}")
