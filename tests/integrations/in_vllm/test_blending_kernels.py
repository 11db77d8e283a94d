"""What layers use that are called outside vLLM's compiled pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn


@pytest.mark.parametrize(("ops", "own"), [("none", "native"), ("all", "kernel")])
def test_layers_that_are_called_eagerly_use_kernels_and_compiled_ones_what_they_did(
    ops: str, own: str
) -> None:
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
    from vllm.model_executor.custom_op import CustomOp

    from lwkv.integrations.vllm.blending.model.kernels import EagerKernels

    class Norm(CustomOp):
        name = "rms_norm"

        def forward_native(self, *_: Any) -> str:
            return "native"

        def forward_cpu(self, *_: Any) -> str:
            return "kernel"

    class Another(Norm):
        name = "another"

    config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE, custom_ops=[ops]))
    with set_current_vllm_config(config):
        norm, another = Norm(), Another()
    kernels = EagerKernels([nn.ModuleList([norm, another]), norm], config)
    assert (norm(), another()) == (own, own)
    with kernels.in_place():
        assert (norm(), another()) == ("kernel", own)
    assert (norm(), another()) == (own, own)
    assert config.compilation_config.custom_ops == [ops]


def test_a_norm_gives_the_same_with_and_without_kernels() -> None:
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    from lwkv.integrations.vllm.blending.model.kernels import EagerKernels

    config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE, custom_ops=["none"]))
    with set_current_vllm_config(config):
        norm = RMSNorm(16)
    kernels, states = EagerKernels([norm], config), torch.randn(3, 16)
    wanted = norm(states.clone(), states.clone())
    with kernels.in_place():
        found = norm(states.clone(), states.clone())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


class Linear(nn.Linear):
    """Gives a bias, too, as vLLM's do."""

    def forward(self, states: Any) -> Any:
        return super().forward(states), None


class Norm(nn.Module):
    def forward(self, states: Any, residual: Any) -> Any:
        return (residual + states) * 2, residual + states


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.scale = Linear(4, 12), Linear(4, 4), 3

    def forward(self, positions: Any, states: Any, other: Any = None) -> Any:
        qkv, _ = self.qkv(states)
        q, k, v = qkv.split([4, 4, 4], dim=-1)
        if other is not None:
            q = q * other
        attended, _ = self.out(q * positions[:, None] + k * v * self.scale)
        return attended


class LooksAtValues(nn.Module):
    def forward(self, states: Any) -> Any:
        return states if states.sum() > 0 else -states


class Layer(nn.Module):
    """A decoder layer with an optional argument, and a part that cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention, self.mlp = Norm(), Attention(), LooksAtValues()

    def forward(self, positions: Any, states: Any, residual: Any, scale: Any = None) -> Any:
        if residual is None:
            return states, states
        states, residual = self.before(states, residual)
        states = self.attention(positions=positions, states=states)
        return self.mlp(states if scale is None else states * scale), residual


def test_a_flat_layer_gives_what_the_layer_gives_and_what_cannot_be_traced_stays_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig

    from lwkv.integrations.vllm.blending.model import flat_layer

    monkeypatch.setattr(flat_layer, "MODELS", __name__)
    config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
    layer, called = Layer(), list[nn.Module]()
    layer.attention.out.register_forward_hook(lambda part, *_: called.append(part))
    flat = flat_layer.flat_layer(layer, config)
    assert flat is not None
    positions = torch.arange(5)
    for _ in range(3):  # the signs of what is looked at differ
        states, residual = torch.randn(2, 5, 4)
        wanted = layer(positions, states, residual)
        called.clear()
        found = flat(positions, states, residual)
        assert called == [layer.attention.out]
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
    assert flat_layer.flat_layer(LooksAtAll(), config) is None


class LooksAtAll(nn.Module):
    """A layer that cannot be traced at all."""

    def forward(self, positions: Any, states: Any, residual: Any) -> Any:
        return (states, residual) if len(positions) > 2 else (residual, states)
