"""Rows that stand anywhere see the keys up to their own position."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from lwkv.blend.forward.attention import (
    attend,
    attend_paged,
    attention_paid,
    choose_attend,
    choose_attend_paged,
)
from lwkv.platforms import Platform

CASES = [(5, 23, 6, 2, 10), (70, 200, 4, 4, 16), (130, 300, 8, 2, 64), (1, 77, 4, 1, 32), (40, 40, 2, 1, 8)]


def weights(q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    """The softmax of every row and head, float64 (rows, heads, keys), one row after the other."""
    found = torch.zeros(len(q), q.shape[1], len(k), dtype=torch.float64)
    for row, position in enumerate(positions.tolist()):
        for head in range(q.shape[1]):
            keys = k[: position + 1, head * k.shape[1] // q.shape[1]].double()
            scores = keys @ q[row, head].double() / q.shape[-1] ** 0.5
            found[row, head, : position + 1] = scores.softmax(0)
    return found


def drawn(case: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, num_keys, heads, kv_heads, size = case
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(7))
    # Rows of q are part of something larger, as a model's projections are.
    q = draw(num_rows, heads + 3, size)[:, :heads].to(dtype)
    k, v = draw(2, num_keys, kv_heads, size).to(dtype)
    positions = torch.randperm(num_keys, generator=torch.Generator().manual_seed(8))[:num_rows].sort().values
    return q, k, v, positions


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_row_sees_what_stands_before_it_and_nothing_else(
    case: tuple[int, ...], platform: Platform, device: torch.device
) -> None:
    q, k, v, positions = drawn(case)
    expanded = v.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    wanted = torch.einsum("rhk,khd->rhd", weights(q, k, positions), expanded).float()
    for way in (attend, choose_attend(platform)):
        found = way(*(t.to(device) for t in (q, k, v, positions))).cpu()
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_half_precision_stays_near(platform: Platform, device: torch.device) -> None:
    q, k, v, positions = drawn(CASES[2], torch.bfloat16)
    wanted = attend(q.float(), k.float(), v.float(), positions)
    found = choose_attend(platform)(*(t.to(device) for t in (q, k, v, positions))).cpu()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)


def test_keys_behind_a_row_change_nothing_of_it(platform: Platform, device: torch.device) -> None:
    q, k, v, positions = (t.to(device) for t in drawn(CASES[2]))
    way = choose_attend(platform)
    before = way(q, k, v, positions)
    last = int(positions[100])
    k[last + 1 :], v[last + 1 :] = 1e4, -1e4
    assert torch.equal(way(q, k, v, positions)[:101], before[:101])


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_attention_paid_is_that_of_the_row_that_pays_most(
    case: tuple[int, ...], device: torch.device
) -> None:
    q, k, _, positions = drawn(case)
    wanted = weights(q, k, positions).amax(0).mean(0).float()
    found = attention_paid(q.to(device), k.to(device), positions.to(device)).cpu()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def paged(k: Tensor, v: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same keys and values in blocks anywhere, NaN in all other rows; and the blocks' numbers."""
    count = -(-len(k) // block)
    blocks = torch.randperm(2 * count + 1, generator=torch.Generator().manual_seed(9))[:count]
    cache = torch.full((2 * count + 1, 2, block, *k.shape[1:]), torch.nan, dtype=k.dtype)
    for token in range(len(k)):
        cache[blocks[token // block], :, token % block] = torch.stack((k[token], v[token]))
    return cache[:, 0], cache[:, 1], blocks.to(torch.int32)


@pytest.mark.parametrize("block", [1, 5, 16])
@pytest.mark.parametrize("case", CASES[:4], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_see_the_same_in_blocks_of_a_paged_cache(
    case: tuple[int, ...], block: int, dtype: torch.dtype, platform: Platform, device: torch.device
) -> None:
    q, k, v, positions = drawn(case, dtype)
    wanted = attend(q.float(), k.float(), v.float(), positions)
    # Nothing behind the last row is read: it may be anything.
    seen = int(positions[-1]) + 1
    k_blocks, v_blocks, blocks = (t.to(device) for t in paged(k[:seen], v[:seen], block))
    for way in (attend_paged, choose_attend_paged(platform) or attend_paged):
        out = torch.empty(q.shape, dtype=dtype, device=device)
        way(q.to(device), k_blocks, v_blocks, positions.to(device), blocks, q.shape[-1] ** -0.5, out)
        near = 2e-2 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(out.float().cpu(), wanted, rtol=near, atol=near)


def test_the_scale_is_the_callers(platform: Platform, device: torch.device) -> None:
    q, k, v, positions = drawn(CASES[2])
    wanted = attend(q * 3.0, k, v, positions)
    k_blocks, v_blocks, blocks = (t.to(device) for t in paged(k, v, 5))
    out = torch.empty(q.shape, device=device)
    way = choose_attend_paged(platform) or attend_paged
    way(q.to(device), k_blocks, v_blocks, positions.to(device), blocks, 3 * q.shape[-1] ** -0.5, out)
    torch.testing.assert_close(out.cpu(), wanted, rtol=1e-4, atol=1e-5)
