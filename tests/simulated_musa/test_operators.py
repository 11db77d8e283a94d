"""Operators of the simulated device give the CPU's results, queued on the current stream."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

DEVICE = torch.device("musa", 0)
Operator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def attention(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


# Each takes x, float (4, 6), and rows, int64 (4,).
QUEUED: dict[str, Operator] = {
    "add": lambda x, rows: x + 2.5,
    "add_in_place": lambda x, rows: x.add_(x, alpha=3),
    "arange": lambda x, rows: torch.arange(7, device=x.device),
    "cat": lambda x, rows: torch.cat([x, x[1:]], 1 - 1),
    "convert": lambda x, rows: x.to(torch.bfloat16),
    "fill": lambda x, rows: x.clone().fill_(4),
    "gather": lambda x, rows: x.gather(1, rows.expand(2, 4)),
    "index": lambda x, rows: x[rows],
    "index_copy_in_place": lambda x, rows: x.index_copy_(0, rows, x * 2),
    "index_put_in_place": lambda x, rows: x.index_put_((rows,), x * 2),
    "index_select": lambda x, rows: x.index_select(0, rows),
    "index_select_out": lambda x, rows: torch.index_select(x, 0, rows, out=x.new_empty(4, 6)),
    "index_select_out_resized": lambda x, rows: torch.index_select(x, 0, rows, out=x.new_empty(0)),
    "layer_norm": lambda x, rows: F.layer_norm(x, (6,)),
    "linear": lambda x, rows: F.linear(x, x),
    "matmul": lambda x, rows: x @ x.T,
    "multiply_by_number": lambda x, rows: (x.to(torch.int8) * 2) + 1,
    "scatter_in_place": lambda x, rows: x.scatter_(0, rows.view(4, 1), 9.0),
    "silu": lambda x, rows: F.silu(x),
    "softmax": lambda x, rows: x.softmax(-1),
    "sort_values": lambda x, rows: x.sort(descending=True).values,
    "stack": lambda x, rows: torch.stack([x, x]),
    "strided_copy": lambda x, rows: torch.empty_like(x.T).copy_(x.T),
    "sum": lambda x, rows: x.sum(0),
    "where": lambda x, rows: torch.where(x > 7, x, -1),
    "attention": lambda x, rows: attention(x.view(1, 1, 4, 6)),
}


def given(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(24, dtype=torch.float32).view(4, 6)
    return x.to(device), torch.tensor([2, 0, 3, 1]).to(device)


@pytest.mark.parametrize("name", QUEUED)
def test_operators_are_queued_and_give_the_results_of_the_cpu(late: None, name: str) -> None:
    expected = QUEUED[name](*given(torch.device("cpu")))
    arguments = given(DEVICE)
    torch.musa.synchronize()
    result = QUEUED[name](*arguments)
    assert result.device == DEVICE
    assert result.dtype == expected.dtype
    assert result.stride() == expected.stride()
    assert not torch.musa.current_stream().query()
    torch.testing.assert_close(result.cpu(), expected)


NOW: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "count": lambda x, rows: int((x > 3).sum()),
    "equal": lambda x, rows: torch.equal(x, x.clone()),
    "index_by_host_rows": lambda x, rows: x[rows.cpu()].tolist(),
    "item": lambda x, rows: x[2, 3].item(),
    "masked": lambda x, rows: x[x > 7].tolist(),
    "masked_write": lambda x, rows: x.masked_fill_(x > 7, 2).tolist(),
    "nonzero": lambda x, rows: x.nonzero().tolist(),
    "unique": lambda x, rows: rows.unique().tolist(),
    "write_by_host_rows": lambda x, rows: x.index_put_((rows.cpu(),), x * 2).tolist(),
}


@pytest.mark.parametrize("name", NOW)
def test_operators_whose_results_the_host_needs_wait_for_the_stream(late: None, name: str) -> None:
    x, rows = given(DEVICE)
    assert NOW[name](x.add_(1), rows) == NOW[name](given(torch.device("cpu"))[0].add_(1), rows.cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_bytes_survive_the_way_there_and_back(dtype: torch.dtype) -> None:
    data = torch.arange(96, dtype=torch.uint8) % 2
    there = data.view(dtype).to(DEVICE, non_blocking=False)
    assert torch.equal(there.view(torch.uint8).cpu(), data)


@pytest.mark.parametrize("non_blocking", [True, False])
def test_copies_keep_strides_broadcast_and_convert(late: None, non_blocking: bool) -> None:
    source = torch.arange(12, dtype=torch.int64).view(3, 4).T.pin_memory()
    target = torch.zeros(4, 6, dtype=torch.float16, device=DEVICE)
    target[:, ::2].copy_(source, non_blocking=non_blocking)
    target[:, 1::2].copy_(source[:, :1], non_blocking=non_blocking)
    back = torch.zeros(6, 4).T
    back.copy_(target, non_blocking=non_blocking)
    torch.musa.current_stream().synchronize()
    assert torch.equal(back[:, ::2], source.float())
    assert torch.equal(back[:, 1::2], source[:, :1].float().expand(4, 3))


def test_copies_between_devices_are_ordered_with_both_streams(late: None) -> None:
    first = torch.arange(3, device=DEVICE)
    second = torch.zeros(3, dtype=torch.int64, device="musa:1").add_(5)
    second.copy_(first.add_(1))
    first.zero_()
    assert second.tolist() == [1, 2, 3]


def test_views_share_memory() -> None:
    x = torch.zeros(4, 6, device=DEVICE)
    x.view(2, 12)[1, ::2].fill_(1)
    x.unfold(1, 2, 2)[0, 0].fill_(3)
    x.as_strided((2,), (1,), 22).fill_(7)
    assert x.tolist() == [[3, 3, 0, 0, 0, 0], [0] * 6, [1, 0] * 3, [1, 0, 1, 0, 7, 7]]


def test_a_storage_can_be_read_as_bytes() -> None:
    x = torch.tensor([1, 256], dtype=torch.int16, device=DEVICE)
    data = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(x.untyped_storage())
    assert data[:4].tolist() == [1, 0, 0, 1]


def test_mixing_devices_is_refused() -> None:
    here = torch.ones(3, device=DEVICE)
    with pytest.raises(RuntimeError, match="same device"):
        here + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        here + torch.ones(3, device="musa:1")
    with pytest.raises(RuntimeError, match="same device"):
        here.index_copy_(0, torch.tensor([0, 1, 2]), here * 2)


def test_random_numbers_are_those_of_the_cpu() -> None:
    torch.manual_seed(4)
    expected = torch.randn(5)
    torch.manual_seed(4)
    assert torch.equal(torch.randn(5, device=DEVICE).cpu(), expected)


def test_wrong_shapes_are_refused_by_the_call() -> None:
    with pytest.raises(RuntimeError, match="size"):
        torch.ones(3, device=DEVICE) + torch.ones(2, device=DEVICE)
