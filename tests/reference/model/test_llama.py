from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dense_model import Dense
from torch import Tensor

from lwkv.reference import LAYOUTS, ModelShape, NoCache, PagedCache, RopeScaling, forward, random_model
from lwkv.reference.batch import Part, build_batch
from lwkv.reference.model.random_model import RandomTensors
from lwkv.reference.model.weights import assemble

TOKENS = [(7 * i * i + 3 * i) % 101 for i in range(23)]
VARIANTS = {
    "plain": {},
    "one head a KV head": {"num_kv_heads": 6},
    "one KV head": {"num_kv_heads": 1},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "tied_embeddings": True},
    "partly rotated": {"rotary_fraction": 0.4},
    "llama3": {"rope_scaling": RopeScaling("llama3", 8.0, 16)},
    "yarn": {"rope_scaling": RopeScaling("yarn", 4.0, 16)},
}


def _logits(model_shape: ModelShape, device: torch.device, layout: str, cuts: list[int]) -> Tensor:
    """Logits after each of the cuts: the tokens are computed in that many parts, blocks in falling order."""
    model = random_model(model_shape, seed=5, device=device)
    cache = PagedCache(model_shape, num_blocks=8, block_size=5, layout=layout, device=device)
    cache.fill(float("nan"))
    rows = []
    for start, end in zip([0, *cuts], cuts, strict=False):
        batch = build_batch([Part(TOKENS[start:end], start, [7, 5, 3, 1, 0])], 5, device)
        rows.append(forward(model, cache, batch, NoCache()))
    return torch.cat(rows).cpu()


def _dense(shape: ModelShape, device: torch.device) -> Tensor:
    dense = Dense(shape, RandomTensors(shape, seed=5, scale=2.0, device=device))
    dense.tensors = {name: tensor.cpu() for name, tensor in dense.tensors.items()}
    return dense.logits(TOKENS).float()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_position_equals_a_dense_model(variant: str, shape: ModelShape, device: torch.device) -> None:
    changed = replace(shape, **VARIANTS[variant])
    found = _logits(changed, device, "vllm_bhn2d", list(range(1, 24)))
    torch.testing.assert_close(found, _dense(changed, device), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cuts", [[23], [1, 23], [22, 23], [5, 10, 23], [4, 6, 7, 8, 23]])
def test_a_prefill_in_parts_equals_a_dense_model(
    cuts: list[int], layout: str, shape: ModelShape, device: torch.device
) -> None:
    expected = _dense(shape, device)[[cut - 1 for cut in cuts]]
    torch.testing.assert_close(_logits(shape, device, layout, cuts), expected, rtol=1e-4, atol=1e-4)


def test_half_precision_stays_near_the_dense_model(shape: ModelShape, device: torch.device) -> None:
    model = random_model(shape, seed=5, device=device, dtype=torch.bfloat16)
    cache = PagedCache(shape, num_blocks=5, block_size=5, dtype=torch.bfloat16, device=device)
    batch = build_batch([Part(TOKENS, 0, [4, 3, 2, 1, 0])], 5, device)
    found = forward(model, cache, batch, NoCache())[0].cpu()
    assert found.dtype == torch.float32
    assert torch.cosine_similarity(found, _dense(shape, device)[-1], dim=0) > 0.98


def test_each_tokens_kv_matters_to_the_output(shape: ModelShape, device: torch.device) -> None:
    model = random_model(shape, seed=5, device=device)

    def last(spoilt: int | None) -> Tensor:
        cache = PagedCache(shape, num_blocks=5, block_size=5, device=device)
        forward(model, cache, build_batch([Part(TOKENS[:22], 0, [0, 1, 2, 3, 4])], 5, device), NoCache())
        if spoilt is not None:
            list(cache.tensors.values())[1][spoilt // 5, :, spoilt % 5] *= -1
        return forward(
            model, cache, build_batch([Part(TOKENS[22:], 22, [0, 1, 2, 3, 4])], 5, device), NoCache()
        )

    plain = last(None)
    changes = torch.tensor([float((last(token) - plain).abs().max()) for token in range(22)])
    # Tolerances are 1e-4: no token's KV may be wrong unseen.
    assert changes.min() > 3e-3
    assert changes.median() > 0.03


def test_the_forward_pass_reads_no_value_back_to_the_host(shape: ModelShape) -> None:
    # A meta tensor has no values: whatever asks for one raises.
    model = assemble(
        shape, RandomTensors(shape, seed=5, scale=2.0), device=torch.device("meta"), dtype=torch.float32
    )
    cache = PagedCache(shape, num_blocks=8, block_size=5, device="meta")
    parts = [Part(TOKENS[:7], 0, [0, 1]), Part(TOKENS[3:7], 3, [2, 3]), Part(TOKENS[6:7], 6, [4, 5])]
    logits = forward(model, cache, build_batch(parts, 5, model.device), NoCache())
    assert logits.shape == (3, 101)
