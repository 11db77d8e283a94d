"""Keys are turned to new positions on their way into the cache, as if computed there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lwkv.kernels import Kernels, Rows, StagedLayers, Turn
from lwkv.layouts.layout import PagedLayer

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
forms = pytest.mark.parametrize(
    ("half", "interleaved"),
    [(4, False), (4, True), (3, False), (3, True), (1, False)],
    ids=["neox", "interleaved", "partial neox", "partial interleaved", "one pair"],
)


def rope(x: Tensor, positions: Tensor, half: int, interleaved: bool) -> Tensor:
    """RoPE of x, (T, H, D), in fp64 by complex numbers."""
    turned = x.double().clone()
    pairs = turned[..., : 2 * half]
    a, b = (pairs[..., ::2], pairs[..., 1::2]) if interleaved else (pairs[..., :half], pairs[..., half:])
    phase = torch.polar(
        torch.ones(len(positions), 1, half, dtype=torch.float64), angles(positions, half)[:, None]
    )
    result = torch.complex(a, b) * phase
    a.copy_(result.real)
    b.copy_(result.imag)
    return turned


def angles(positions: Tensor, half: int) -> Tensor:
    return positions.double()[:, None] * 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)


def turn_by(shift: Tensor, half: int, interleaved: bool, device: torch.device) -> Turn:
    """Tables of the different shifts, in an order that is not theirs."""
    shifts, numbers = shift.flip(0).unique(return_inverse=True)
    angle = angles(shifts, half)
    return Turn(
        angle.cos().float().to(device),
        angle.sin().float().to(device),
        numbers.flip(0).to(device),
        interleaved,
    )


def make_keys(tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tokens, 3, 8, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(
        dtype
    )


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Within one rounding of `dtype`; 1e-5 for fp32, whose angles were rounded too."""
    tolerance = 1e-5 if dtype.itemsize >= 4 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.cpu().double(), wanted.double(), rtol=tolerance, atol=tolerance)


@pytest.fixture
def turn(kernels: Kernels, run: Callable, device: torch.device) -> Callable[..., Tensor]:
    """Rows of keys, (T, H, D), turned on their way into a cache of K only; by default a new one."""

    def turned(
        raw: Tensor, shift: Tensor, half: int, interleaved: bool, cache: Tensor | None = None
    ) -> Tensor:
        k = torch.zeros_like(raw, device=device)[None] if cache is None else cache
        layer = PagedLayer("deep.0", raw.dtype, k.view(INTEGERS[raw.dtype.itemsize]), None)
        number = torch.arange(len(raw), device=device)
        staging, how = raw.to(device).view(torch.uint8).flatten(), turn_by(shift, half, interleaved, device)
        staged = StagedLayers([layer], staging, 0, Rows(number, number, number), how)
        run(lambda: kernels.move_layers(True, staged))
        return k[0].cpu()

    return turned


@forms
def test_a_rotated_key_equals_one_computed_at_the_new_position(
    half: int, interleaved: bool, turn: Callable[..., Tensor]
) -> None:
    raw = make_keys(5)
    old, new = torch.tensor([0, 1, 70, 5000, 9]), torch.tensor([40, 3, 7, 5001, 0])
    k = turn(rope(raw, old, half, interleaved).float(), new - old, half, interleaved)
    close(k, rope(raw, new, half, interleaved), torch.float32)
    assert torch.equal(k[..., 2 * half :], raw[..., 2 * half :])


@forms
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_there_and_back_gives_the_key_again(
    dtype: torch.dtype, half: int, interleaved: bool, turn: Callable[..., Tensor]
) -> None:
    raw, shift = make_keys(4, dtype), torch.tensor([1, 77, 3000, 2])
    k = turn(turn(raw, shift, half, interleaved), -shift, half, interleaved)
    tolerance = 1e-5 if dtype.itemsize >= 4 else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(k.double(), raw.double(), rtol=0, atol=tolerance)


def test_rotation_leaves_what_lies_between_the_heads(
    turn: Callable[..., Tensor], device: torch.device
) -> None:
    memory = torch.full((5, 3, 11), 6.5, device=device)
    raw = make_keys(3)[:, :1].expand(3, 5, 8).contiguous()
    k = turn(raw, torch.tensor([1, 2, 3]), 4, False, memory[:, :, 1:9].transpose(0, 1)[None])
    close(k, rope(raw, torch.tensor([1, 2, 3]), 4, False), torch.float32)
    assert memory[..., 0].eq(6.5).all()
    assert memory[..., 9:].eq(6.5).all()


@forms
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_rotated_scatter_turns_k_and_leaves_v(
    dtype: torch.dtype, half: int, interleaved: bool, kernels: Kernels, run: Callable, device: torch.device
) -> None:
    integer = INTEGERS[dtype.itemsize]
    cache = torch.zeros(2, 4, 5, 3, 8, dtype=integer, device=device)
    layer = PagedLayer("deep.0", dtype, cache[0], cache[1])
    raw = make_keys(8, dtype)
    staging = raw.view(torch.uint8).flatten().to(device)
    numbers = [torch.tensor(n).to(device) for n in ([19, 3, 11, 4], [0, 1, 2, 3], [4, 5, 6, 7])]
    shift = torch.tensor([5, -2, 100, 0])
    staged = StagedLayers([layer], staging, 0, Rows(*numbers), turn_by(shift, half, interleaved, device))
    run(lambda: kernels.move_layers(True, staged))
    k, v = cache.cpu().view(dtype).flatten(1, 2)
    close(k[[19, 3, 11, 4]], rope(raw[:4], shift, half, interleaved), dtype)
    assert torch.equal(k.view(integer)[[19, 3, 11], :, 2 * half :], raw.view(integer)[:3, :, 2 * half :])
    assert torch.equal(v.view(integer)[[19, 3, 11, 4]], raw.view(integer)[4:])
    untouched = [slot for slot in range(20) if slot not in (19, 3, 11, 4)]
    assert not k.view(integer)[untouched].any()
    assert not v.view(integer)[untouched].any()


def test_a_cache_of_raw_bytes_cannot_be_rotated(kernels: Kernels, device: torch.device) -> None:
    layer = PagedLayer("deep.0", torch.uint8, torch.zeros(2, 4, 1, 8, dtype=torch.uint8, device=device), None)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    turn = Turn(*torch.zeros(2, 0, 4, device=device), none, False)
    staging = torch.zeros(8, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"'deep\.0' is torch\.uint8.*only float"):
        kernels.move_layers(True, StagedLayers([layer], staging, 0, Rows(none, none, none), turn))
