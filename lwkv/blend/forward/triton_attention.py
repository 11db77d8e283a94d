# mypy: ignore-errors
"""Attention of chosen rows in Triton: what `attention.attend` does, for devices that have it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def _look(
    q, k, v, best, total, seen, places, start, stop, key_step, value_step, position,
    table, key_block_step, value_block_step, scale,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, KEYS: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Let a tile of rows see the keys [start, stop), a multiple of KEYS unless MASKED; no other is read.

    What is behind `stop` may be anything, NaN too, and 0 times NaN is NaN.

    With a BLOCK, key i is row `i % BLOCK` of the block `table[i // BLOCK]`.
    """
    for first in range(start, stop, KEYS):
        key = first + tl.arange(0, KEYS)
        inside = (key < stop)[:, None] & places[None, :] if MASKED else places[None, :]
        if BLOCK > 0:
            mask = key < stop if MASKED else key >= 0
            block = tl.load(table + key // BLOCK, mask=mask, other=0).to(tl.int64)
            row = (key % BLOCK).to(tl.int64)
            key_place, value_place = block * key_block_step, block * value_block_step
            key_place, value_place = key_place + row * key_step, value_place + row * value_step
        else:
            key_place, value_place = key.to(tl.int64) * key_step, key.to(tl.int64) * value_step
        tile = tl.load(k + key_place[:, None], mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(tile), input_precision=PRECISE) * scale
        if MASKED:
            scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weight = tl.exp2(scores - higher[:, None])
        faded = tl.exp2(best - higher)
        total = total * faded + tl.sum(weight, 1)
        tile = tl.load(v + value_place[:, None], mask=inside, other=0.0)
        seen = tl.dot(weight.to(tile.dtype), tile, seen * faded[:, None], input_precision=PRECISE)
        best = higher
    return best, total, seen


@triton.jit(do_not_specialize=["num_rows"])
def attend_rows(
    q, k, v, out, positions, num_rows, row_step, head_step, key_step, key_head_step,
    value_step, value_head_step, table, key_block_step, value_block_step, scale,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one head. Rows ascend in position: a tile reads no key behind its last row's."""
    # The last rows see most keys: they go first, so that no long one is left at the end.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    element = tl.arange(0, WIDTH)
    places, valid = element < SIZE, row < num_rows
    position = tl.load(positions + row, mask=valid, other=-1).to(tl.int32)
    last = tl.max(position, 0)
    position = tl.where(valid, position, last)
    whole = (tl.min(position, 0) + 1) // KEYS * KEYS
    where = row.to(tl.int64)[:, None] * row_step + head * head_step + element[None, :]
    mine = tl.load(q + where, mask=valid[:, None] & places[None, :], other=0.0)
    k += (head // GROUP) * key_head_step + element[None, :]
    v += (head // GROUP) * value_head_step + element[None, :]
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    seen = tl.zeros([ROWS, WIDTH], tl.float32)
    best, total, seen = _look(
        mine, k, v, best, total, seen, places, 0, whole, key_step, value_step, position,
        table, key_block_step, value_block_step, scale, BLOCK, False, KEYS, PRECISE,
    )  # fmt: skip
    best, total, seen = _look(
        mine, k, v, best, total, seen, places, whole, last + 1, key_step, value_step, position,
        table, key_block_step, value_block_step, scale, BLOCK, True, KEYS, PRECISE,
    )  # fmt: skip
    place = (row.to(tl.int64)[:, None] * tl.num_programs(1) + head) * SIZE + element[None, :]
    result = (seen / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + place, result, mask=valid[:, None] & places[None, :])


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """As `lwkv.blend.forward.attention.attend`; heads without gaps between elements, no float64."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(q, k, v, positions, out, positions, (0, 0, 0), q.shape[2] ** -0.5)
    return out


def attend_paged(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor,
    scale: float, out: torch.Tensor,
) -> None:  # fmt: skip
    """As `lwkv.blend.forward.attention.attend_paged`; float64 is not supported."""
    _launch(q, k[0], v[0], positions, out, blocks, (k.shape[1], k.stride(0), v.stride(0)), scale)


def _launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, out: torch.Tensor,
    blocks: torch.Tensor, paging: tuple[int, int, int], scale: float,
) -> None:  # fmt: skip
    (num_rows, heads, size), rows = q.shape, 64
    block, key_block_step, value_block_step = paging
    # Tiles of K and V, as many as there are stages, have to fit into 99 KiB, as devices of desktops have.
    row_bytes = triton.next_power_of_2(size) * q.element_size()
    keys, stages = 64 if row_bytes <= 512 else 32, 3 if row_bytes <= 256 else 2
    attend_rows[(triton.cdiv(num_rows, rows), heads)](
        q, k, v, out, positions, num_rows, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        v.stride(0), v.stride(1), blocks, key_block_step, value_block_step, scale * LOG2_E,
        BLOCK=block, GROUP=heads // k.shape[1], SIZE=size, WIDTH=max(triton.next_power_of_2(size), 16),
        ROWS=rows, KEYS=keys, PRECISE="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=stages,
    )  # fmt: skip
