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
