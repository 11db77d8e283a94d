"""Choosing by change at a partial share, against a dense model in which rows leave midway."""

from __future__ import annotations

import pytest
import torch
from blend.conftest import Bench, prompt
from dense_model import KV, Keep
from torch import Tensor

from lwkv.blend import Deviation


def keeping(selector: Deviation, reused: dict[int, list[KV]]) -> Keep:
    """Keep what has changed most at each check layer, and all that was not reused."""
    part = "kv".index(selector.part)

    def keep(layer: int, rows: Tensor, new: KV) -> Tensor:
        if layer not in selector.layers:
            return rows
        changed = {
            start + i: sum(float((mine[start + i] - old[i]).square().sum()) for mine, old in heads)
            for start, layers in reused.items()
            for heads in [list(zip(new[part], layers[layer][part], strict=True))]
            for i in range(len(heads[0][1]))
        }
        share = selector.shares[selector.layers.index(layer)]
        left = [row for row in rows.tolist() if row in changed]
        chosen = sorted(left, key=lambda row: changed[row], reverse=True)[: round(len(changed) * share)]
        always = [row for row in rows.tolist() if row not in changed]
        return torch.tensor(sorted([*chosen, *always]))

    return keep


@pytest.mark.parametrize("part", ["v", "k"])
@pytest.mark.parametrize(
    ("layers", "shares"),
    [((1,), (0.2,)), ((2,), (0.3,)), ((1, 2), (0.5, 0.2)), ((1, 2, 3), (0.5, 0.3, 0.1))],
)
def test_a_part_chosen_by_change_equals_the_dense_reference(
    part: str, layers: tuple[int, ...], shares: tuple[float, ...], bench: Bench
) -> None:
    selector = Deviation(part, layers, shares)
    blender = bench.blender(selector, share=shares[-1])
    bench.encode(blender)
    tokens, request = prompt([2, 0, 1])
    (found,) = blender.prefill([request])
    assert found.num_chosen == round(42 * shares[-1])
    reused = {start: bench.alone(blender, tokens[start:end]) for start, end in request.segments}
    wanted = bench.dense.blend(tokens, range(len(tokens)), reused, keeping(selector, reused))
    torch.testing.assert_close(found.logits.cpu(), wanted.float(), rtol=1e-4, atol=1e-4)
