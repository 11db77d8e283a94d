"""lwkv's kernel in the place of a layer's attention, for calls that are made for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lwkv.integrations.vllm.blending.model import row_attention
from lwkv.integrations.vllm.blending.model.row_attention import (
    RowAttentions,
    RowMetadata,
    is_better,
    is_plain,
)
from lwkv.layouts.paged_layer import PagedLayer


class Own:
    """What vLLM has in a layer."""

    scale, sliding_window, alibi_slopes, sinks, logits_soft_cap = 0.5, (-1, -1), None, None, 0

    def forward(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, cache: Any, metadata: Any, output: Tensor):
        return output.fill_(7)

    def do_kv_cache_update(self) -> str:
        return "written"


def module(**attributes: Any) -> Any:
    own = Own()
    vars(own).update(attributes)
    return SimpleNamespace(impl=own, attn_backend=SimpleNamespace(forward_includes_kv_cache_update=False))


def layer() -> PagedLayer:
    k, v = torch.zeros(2, 4, 5, 2, 8, dtype=torch.int16)
    return PagedLayer("layer", torch.bfloat16, k, v)


def test_calls_that_are_made_for_it_are_computed_by_the_kernel_and_others_by_the_layers_own() -> None:
    given = []

    def attend(
        q: Tensor, k: Tensor, v: Tensor, at: Tensor, blocks: Tensor, scale: float, out: Tensor
    ) -> None:
        given.append((k.dtype, v.shape, at, blocks, scale))
        out.fill_(3)

    one = module()
    own = one.impl
    attentions = RowAttentions([one], [layer()], attend)
    q, output = torch.zeros(3, 4, 8), torch.zeros(3, 32)
    metadata = RowMetadata(torch.tensor([0, 4, 9]), torch.tensor([2, 1], dtype=torch.int32))
    with attentions.in_place():
        assert one.impl.do_kv_cache_update() == "written"
        one.impl.forward(one, q, q, q, None, metadata, output=output)
        assert (output == 3).all()
        one.impl.forward(one, q, q, q, None, "vLLM's", output=output)
        assert (output == 7).all()
    assert one.impl is own
    assert given == [(torch.bfloat16, torch.Size([4, 5, 2, 8]), metadata.positions, metadata.blocks, 0.5)]


def test_a_call_that_fails_leaves_the_layers_own_attention() -> None:
    modules = [module(), module()]
    own = [one.impl for one in modules]
    attentions = RowAttentions(modules, [layer(), layer()], lambda *_: None)
    with pytest.raises(RuntimeError, match="the device fails"), attentions.in_place():
        raise RuntimeError("the device fails")
    assert [one.impl for one in modules] == own


def test_it_is_for_many_short_runs_only() -> None:
    few = np.arange(1, row_attention.FEWEST_RUNS)
    many = np.arange(1, row_attention.FEWEST_RUNS + 1)
    assert not is_better(few, 0)
    assert is_better(many, 0)
    assert not is_better(many * row_attention.ROWS_OF_A_RUN, 0)
    assert is_better(many * row_attention.ROWS_OF_A_RUN + 5, 6)


def test_attention_that_is_more_than_a_softmax_over_all_keys_stays_vllms() -> None:
    assert is_plain(module())
    assert is_plain(module(sliding_window=-1))
    for special in (
        {"sliding_window": (127, 0)},
        {"sliding_window": 128},
        {"alibi_slopes": torch.ones(4)},
        {"sinks": torch.ones(4)},
        {"logits_soft_cap": 30.0},
    ):
        assert not is_plain(module(**special)), special
    one = module()
    one.attn_backend.forward_includes_kv_cache_update = True
    assert not is_plain(one)
