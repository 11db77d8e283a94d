"""What a cache holds: the model and the share of it that one rank has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lwkv.errors import ConfigError

_NAMES = ("model", "revision", "rope")
_COUNTS = ("num_layers", "num_kv_heads", "head_size", "tp_size", "pp_size")


@dataclass(frozen=True)
class CacheMetadata:
    """Everything about a model that changes the bytes of its KV cache: all of it enters every key.

    Args:
        model: the model's name or path.
        num_layers, num_kv_heads: of this rank, not of the whole model. MLA has one head.
        head_size: elements of a head; with MLA the width of a row.
        dtype: what the model computes in.
        kv_dtype: what the cache stores; None for the same.
        revision: the model's revision, commit or weight version.
        rope: RoPE's parameters in one text, the same text for the same parameters.
        tp_rank, pp_rank: from 0 to size - 1.

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
        for name in _NAMES:
            self._require(name, isinstance(getattr(self, name), str), "text")
        self._require("model", self.model != "", "the model's name")
        for name in _COUNTS:
            self._require(name, _is_whole(getattr(self, name), 1), "a whole number of 1 or more")
        self._require("dtype", isinstance(self.dtype, torch.dtype), "a torch.dtype")
        self._require(
            "kv_dtype", isinstance(self.stored_dtype, torch.dtype), "a torch.dtype, or None for dtype"
        )
        self._require("use_mla", isinstance(self.use_mla, bool), "True or False")
        self._require("num_kv_heads", not self.use_mla or self.num_kv_heads == 1, "1 with use_mla")
        self._require_rank("tp_rank", self.tp_size)
        self._require_rank("pp_rank", self.pp_size)

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the cache's elements."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    def _require_rank(self, name: str, size: int) -> None:
        rank = getattr(self, name)
        self._require(name, _is_whole(rank, 0) and rank < size, f"a whole number from 0 to {size - 1}")

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise ConfigError(f"CacheMetadata.{name}: got {getattr(self, name)!r}; allowed: {allowed}")


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
