"""What a cache holds: the model and the share of it that one rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lwkv.errors import ConfigError

_BYTES = {torch.uint8, torch.int8}


@dataclass(frozen=True)
class CacheMetadata:
    """Everything about a model that changes the bytes of its KV cache: all of it enters every key.

    Args:
        model: the model's name or path.
        num_layers, num_kv_heads: of this rank, not of the whole model. MLA has one head.
        head_size: elements of a head; with MLA the width of a row.
        dtype: what the model computes in.
        kv_dtype: what the cache stores; None for what is registered. It must be said where that is uint8 or
            int8: bytes do not tell which fp8 they are.
        revision: the model's revision, commit or weight version.
        rope: RoPE's parameters in one text, the same text for the same parameters.
        tp_rank, pp_rank: from 0 to size - 1. Where caches are registered as a list their layers have no
            names, and only `pp_size` and `pp_rank` tell which layers of the model these are.

    Raises:
        ConfigError: a field has a wrong type or range.
    """

    model: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None
    revision: str = ""
    use_mla: bool = False
    rope: str = ""
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("model", "revision", "rope"):
            self._require(name, isinstance(getattr(self, name), str), "text")
        self._require("model", self.model != "", "the model's name")
        for name in ("num_layers", "num_kv_heads", "head_size", "tp_size", "pp_size"):
            number = getattr(self, name)
            self._require(name, type(number) is int and number >= 1, "a whole number of 1 or more")
        self._require("dtype", isinstance(self.dtype, torch.dtype), "a torch.dtype")
        self._require(
            "kv_dtype", isinstance(self.stored_dtype, torch.dtype), "a torch.dtype, or None for dtype"
        )
        self._require("use_mla", isinstance(self.use_mla, bool), "True or False")
        self._require("num_kv_heads", not self.use_mla or self.num_kv_heads == 1, "1 with use_mla")
        for name, size in (("tp_rank", self.tp_size), ("pp_rank", self.pp_size)):
            rank = getattr(self, name)
            holds = type(rank) is int and 0 <= rank < size
            self._require(name, holds, f"a whole number from 0 to {size - 1}")

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the cache's elements."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    def as_registered(self, dtypes: Sequence[torch.dtype]) -> CacheMetadata:
        """The same, with what an engine really registered: a layer for each of `dtypes`.

        Raises:
            ConfigError: `kv_dtype` is of none of the layers, or is missing where one is of bytes.
        """
        caches = f"the caches, registered as {', '.join(dict.fromkeys(map(str, dtypes)))}"
        if _BYTES.isdisjoint(dtypes):
            self._require("kv_dtype", self.kv_dtype in (None, *dtypes), f"None, or that of {caches}")
        else:
            wanted = f"what the bytes are of {caches}: such as torch.float8_e4m3fn, or their own dtype"
            self._require("kv_dtype", self.kv_dtype is not None, wanted)
        return replace(self, num_layers=len(dtypes), kv_dtype=self.kv_dtype or dtypes[0])

    @property
    def is_copy(self) -> bool:
        """Whether another rank has the very same rows: with MLA those of the first tensor parallel rank."""
        return self.use_mla and self.tp_rank > 0

    def without_copies(self) -> CacheMetadata:
        """The same for all ranks that have the very same rows."""
        return replace(self, tp_size=1, tp_rank=0) if self.use_mla else self

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise ConfigError(f"CacheMetadata.{name}: got {getattr(self, name)!r}; allowed: {allowed}")
