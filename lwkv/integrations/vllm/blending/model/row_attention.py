"""Attention of rows that stand far apart: by lwkv's kernel, in the place of a layer's own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lwkv.blend.forward.attention import AttendPaged
from lwkv.integrations.vllm.blending.model.replaced import replaced
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms.protocol import Int64s

FEWEST_RUNS = 32
"""Runs from which the kernel is used: vLLM's attention takes a few, each as a sequence, at least as fast."""

ROWS_OF_A_RUN = 64
"""Rows of a run, on average, from which vLLM's attention is faster: a tile of the kernel has as many."""


@dataclass(frozen=True, slots=True)
class RowMetadata:
    """What the kernel must know of a call, in the place of vLLM's metadata of attention.

    Attributes:
        positions: int64 (rows,), ascending, on the device.
        blocks: int32 (blocks,), of the prompt, on the device.
    """

    positions: Tensor
    blocks: Tensor


class RowAttention:
    """Computes the attention of a layer for calls with `RowMetadata`; for any other it is the layer's own."""

    def __init__(self, own: Any, cache: PagedLayer, attend: AttendPaged) -> None:
        assert cache.v is not None
        self._own, self._attend, self._scale = own, attend, float(own.scale)
        self._dtype = cache.dtype
        self._k, self._v = cache.k.view(cache.dtype), cache.v.view(cache.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Any,
        attn_metadata: Any,
        output: Tensor,
        *more: Any,
        **others: Any,
    ) -> Tensor:
        """As vLLM calls it: query and output are (rows, heads, size); K and V are in the cache already."""
        if not isinstance(attn_metadata, RowMetadata):
            own: Tensor = self._own.forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *more, **others
            )
            return own
        rows, heads, size = query.shape[0], query.shape[1], query.shape[2]
        self._attend(
            query,
            self._k,
            self._v,
            attn_metadata.positions,
            attn_metadata.blocks,
            self._scale,
            output.view(rows, heads, size),
        )
        return output


class RowAttentions:
    """Puts `RowAttention` into all layers while these are called from here.

    Args:
        modules: vLLM's attention of each layer.
        caches: of the same layers.
    """

    def __init__(self, modules: Sequence[Any], caches: Sequence[PagedLayer], attend: AttendPaged) -> None:
        self._pairs = [
            (vars(module), RowAttention(module.impl, cache, attend), module.impl)
            for module, cache in zip(modules, caches, strict=True)
        ]

    def in_place(self) -> AbstractContextManager[None]:
        """For the time of some calls, of rows that stand far apart or not."""
        return replaced("impl", self._pairs)


def is_better(ends: Int64s, first: int) -> bool:
    """Whether the kernel is faster for runs that begin at row `first` and end before the rows `ends`."""
    return len(ends) >= FEWEST_RUNS and int(ends[-1]) - first < ROWS_OF_A_RUN * len(ends)


def is_plain(module: Any) -> bool:
    """Whether a layer's attention is a softmax over all keys, of a cache that is written before it."""
    own = module.impl
    return (
        not module.attn_backend.forward_includes_kv_cache_update
        and getattr(own, "alibi_slopes", None) is None
        and getattr(own, "sinks", None) is None
        and not getattr(own, "logits_soft_cap", None)
        and getattr(own, "sliding_window", -1) in (-1, None, (-1, -1))
    )
