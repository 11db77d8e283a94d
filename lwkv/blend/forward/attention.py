"""Attention of rows that stand anywhere in a prompt: each sees the keys up to its own position, no others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lwkv.platforms import Platform

# q (n, heads, size), k and v (N, kv heads, size), positions int64 (n,) ascending: same shape as q.
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# What `attend_paged` takes.
AttendPaged: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, Tensor], None]

MOST_SCORES = 1 << 23
"""Products of queries and keys that are in memory at once, in float32, where one head has no more."""


def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Let row i of q, at `positions[i]`, see the keys 0 to `positions[i]`, whatever rows are left out.

    Args:
        q: (n, heads, size).
        k, v: (N, kv heads, size), of all tokens in the order of positions; heads are a multiple of kv heads.
        positions: int64 (n,), ascending. Where n is N they are all positions.

    Returns: (n, heads, size).
    """
    mask = None if len(q) == len(k) else _mask(positions, len(k))
    out = scaled_dot_product_attention(
        _heads_first(q),
        _heads_first(k),
        _heads_first(v),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def attend_paged(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, blocks: Tensor, scale: float, out: Tensor
) -> None:
    """Let row i of q see the tokens 0 to `positions[i]` of a prompt whose KV is in blocks of a paged cache.

    Args:
        q: (n, heads, size).
        k, v: (num blocks, block size, kv heads, size), of one layer; any strides but 1 in `size`.
        positions: int64 (n,), ascending.
        blocks: int32 (m,), of the prompt's tokens in order, up to the last position at least.
        scale: of the products of queries and keys, before the softmax.
        out: (n, heads, size), contiguous, is written.
    """
    count = int(positions[-1]) + 1
    keys, values = (part[blocks.long()].flatten(0, 1)[:count] for part in (k, v))
    own_scale = q.shape[-1] ** -0.5
    out.copy_(attend(q * (scale / own_scale), keys, values, positions))


def choose_attend_paged(platform: Platform) -> AttendPaged | None:
    """Give Triton's kernel where the platform's features have Triton, nothing elsewhere."""
    if not platform.features.triton:
        return None
    from lwkv.blend.forward import triton_attention

    return triton_attention.attend_paged


def choose_attend(platform: Platform) -> Attend:
    """Give Triton's kernel where the platform's features have Triton, torch's own elsewhere."""
    if not platform.features.triton:
        return attend
    from lwkv.blend.forward import triton_attention

    return partial(_attend_by, triton_attention.attend)


def _attend_by(kernel: Attend, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    # Where no row is left out, torch has the faster ones.
    other = len(q) == len(k) or q.dtype == torch.float64
    return (attend if other else kernel)(q, k, v, positions)


def attention_paid(q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    """How much each key is looked at: float32 (N,), the softmax of the row that does most, mean over heads.

    So a key counts that one word of a question needs, though all the others look elsewhere.
    """
    grouped = q.float().view(len(q), k.shape[1], -1, q.shape[-1])
    hidden, total = ~_mask(positions, len(k))[:, None, None], torch.zeros(len(k), device=q.device)
    # Few heads are few launches each, and all at once may take much memory.
    heads = max(1, MOST_SCORES // (len(k) * q.shape[0] * grouped.shape[2]))
    for some in range(0, k.shape[1], heads):
        mine, keys = grouped[:, some : some + heads], k[:, some : some + heads].float()
        scores = torch.einsum("nhgd,mhd->nhgm", mine, keys) * q.shape[-1] ** -0.5
        total += scores.masked_fill_(hidden, -torch.inf).softmax(-1).amax(0).sum((0, 1))
    return total / q.shape[1]


def _mask(positions: Tensor, num_keys: int) -> Tensor:
    return torch.arange(num_keys, device=positions.device) <= positions[:, None]


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]
