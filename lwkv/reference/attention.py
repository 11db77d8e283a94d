"""Causal attention of a step's new tokens over the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lwkv.reference.batch import Batch, RequestShare
from lwkv.reference.cache import PagedCache


def attend(layer: int, q: Tensor, cache: PagedCache, batch: Batch) -> Tensor:
    """Let q, (T, num_heads, head_size), see its own request's cached tokens up to itself; same shape out."""
    return torch.cat([_attend_share(layer, q[share.rows], cache, share) for share in batch.shares])


def _attend_share(layer: int, q: Tensor, cache: PagedCache, share: RequestShare) -> Tensor:
    k, v = cache.read(layer, share.blocks, share.num_tokens)
    if len(q) == 1:
        return _attend_one(q, k, v)
    out = scaled_dot_product_attention(
        _heads_first(q),
        _heads_first(k),
        _heads_first(v),
        attn_mask=share.mask,
        is_causal=share.mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def _attend_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with one query; the heads that share a KV head take the place of its queries."""
    grouped = q.view(1, k.shape[1], -1, q.shape[-1])
    out = scaled_dot_product_attention(grouped, _heads_first(k), _heads_first(v))
    return out.reshape(q.shape)


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]
