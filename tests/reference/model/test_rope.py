from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lwkv.errors import ConfigError
from lwkv.reference import ModelShape, RopeScaling, inverse_frequencies
from lwkv.reference.model.rope import RopeTable, magnitude, rotate

PLAIN = [1.0, 0.316227766, 0.1, 0.0316227766, 0.01, 0.00316227766, 0.001, 0.000316227766]
LLAMA3 = RopeScaling("llama3", 8.0, 64)
YARN = RopeScaling("yarn", 4.0, 128)
UNROUNDED = RopeScaling("yarn", 4.0, 128, beta_fast=16.0, beta_slow=2.0, attention_factor=1.3, truncate=False)


def _with(shape: ModelShape, scaling: RopeScaling | None) -> ModelShape:
    return replace(shape, head_size=16, rope_scaling=scaling)


# The scaled rows are what transformers 5.24 computes from the same parameters, to its float32.
@pytest.mark.parametrize(
    ("scaling", "expected", "factor"),
    [
        (None, PLAIN, 1.0),
        (RopeScaling("linear", 4.0), [value / 4 for value in PLAIN], 1.0),
        (LLAMA3, [1, 0.244384587, 0.013042256, 0.003952847, 0.00125, 0.000395285, 0.000125, 3.9528e-05], 1.0),
        (YARN, [1, 0.237170815, 0.05, 0.007905695, 0.0025, 0.000790569, 0.00025, 7.9057e-05], 1.138629436),
        (
            UNROUNDED,
            [1, 0.212468684, 0.025664398, 0.007905695, 0.0025, 0.000790569, 0.00025, 7.9057e-05],
            1.3,
        ),
    ],
)
def test_scaled_frequencies_are_those_the_checkpoints_were_trained_with(
    scaling: RopeScaling | None, expected: list[float], factor: float, shape: ModelShape
) -> None:
    found = inverse_frequencies(_with(shape, scaling))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-8)
    assert magnitude(_with(shape, scaling)) == pytest.approx(factor)


def test_far_positions_are_as_exact_as_near_ones(shape: ModelShape, device: torch.device) -> None:
    table = RopeTable(_with(shape, None), device)
    cos, sin = table.rows(torch.tensor([3, 120_000], device=device), 120_001)
    angles = torch.outer(
        torch.tensor([3, 120_000], dtype=torch.float64), inverse_frequencies(_with(shape, None))
    )
    torch.testing.assert_close(cos.cpu().double(), angles.cos(), rtol=0, atol=1e-7)
    torch.testing.assert_close(sin.cpu().double(), angles.sin(), rtol=0, atol=1e-7)


def test_a_table_that_grew_gives_the_same_rows(shape: ModelShape, device: torch.device) -> None:
    table, positions = RopeTable(shape, device), torch.tensor([5, 0], device=device)
    before = table.rows(positions, 6)
    table.rows(positions, 5000)
    assert all(torch.equal(a, b) for a, b in zip(before, table.rows(positions, 6), strict=True))


def test_a_pair_turns_by_its_angle_and_the_unrotated_rest_stays() -> None:
    heads = torch.tensor([[[3.0, 10.0, 4.0, 20.0, 7.0]]])
    turned = rotate(heads, torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    assert turned.tolist() == [[[-4.0, 10.0, 3.0, 20.0, 7.0]]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("longrope", 2.0, 8),
            "rope scaling 'longrope' is not supported; supported are linear, llama3, yarn",
        ),
        (("linear", 0.5), "factor must be at least 1, got 0.5"),
        (("yarn", 2.0), "'yarn' needs original_positions, got 0"),
    ],
)
def test_a_scaling_that_cannot_be_is_refused(arguments: tuple[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RopeScaling(*arguments)
