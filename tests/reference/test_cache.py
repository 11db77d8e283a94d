from __future__ import annotations

import pytest
import torch

from lwkv.errors import ConfigError
from lwkv.reference import LAYOUTS, ModelShape, PagedCache

DIMS = {"vllm_bhn2d": (4, 2, 5, 20), "vllm_2bnhd": (2, 4, 5, 2, 10), "vllm_b2nhd": (4, 2, 5, 2, 10)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_written_is_read_back_and_nothing_else_is_touched(
    layout: str, shape: ModelShape, device: torch.device
) -> None:
    cache = PagedCache(shape, num_blocks=4, block_size=5, layout=layout, device=device)
    cache.fill(-1)
    positions = torch.arange(7, device=device)
    table = torch.tensor([3, 1], device=device)
    k = torch.arange(140.0, device=device).view(7, 2, 10)
    cache.write(1, table[positions // 5], positions % 5, k, k + 1000)
    for found, written in zip(cache.read(1, table, 7), (k, k + 1000), strict=True):
        assert torch.equal(found, written)
    tensors = list(cache.tensors.values())
    assert [tuple(tensor.shape) for tensor in tensors] == [DIMS[layout]] * 3
    assert [int((tensor != -1).sum()) for tensor in tensors] == [0, 280, 0]


def test_layers_have_the_names_an_engine_registers(shape: ModelShape) -> None:
    cache = PagedCache(shape, num_blocks=1)
    assert list(cache.tensors)[1:] == ["model.layers.1.self_attn.attn", "model.layers.2.self_attn.attn"]


def test_an_unknown_layout_is_refused_with_the_known_ones(shape: ModelShape) -> None:
    with pytest.raises(
        ConfigError, match="no cache layout 'nhd'; there are vllm_bhn2d, vllm_2bnhd, vllm_b2nhd"
    ):
        PagedCache(shape, num_blocks=4, layout="nhd")


def test_a_cache_without_blocks_is_refused(shape: ModelShape) -> None:
    with pytest.raises(ConfigError, match="num_blocks 0"):
        PagedCache(shape, num_blocks=0)
