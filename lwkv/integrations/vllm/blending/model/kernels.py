"""vLLM's own kernels for layers that are called outside its compiled pass.

Where vLLM compiles its model, norms, activations and rotary embeddings are written in plain PyTorch, for the
compiler to fuse: called as they stand, they launch several kernels each, or are compiled anew. Attention is
an operator that the compiler does not look into: what is in it can be called too, which is faster.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from vllm import ir
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.model_executor.custom_op import CustomOp
from vllm.platforms import current_platform

from lwkv.integrations.vllm.blending.model.replaced import replaced

OPS = ("rms_norm", "silu_and_mul", "rotary_embedding")
"""vLLM's names for them."""


DIRECT = "use_direct_call"
"""The attribute of vLLM's attention that says whether it calls what it does, or an operator that does."""


class EagerKernels:
    """Puts in place what vLLM uses with `--enforce-eager`, and attention without an operator around it.

    Args:
        layers: of the decoder.
    """

    def __init__(self, layers: Sequence[nn.Module], vllm_config: Any) -> None:
        parts = list({id(part): part for layer in layers for part in layer.modules()}.values())
        with set_current_vllm_config(vllm_config):
            kernels = [(vars(op), eager_kernel(op), op._forward_method) for op in parts if is_known(op)]
        self._kernels = [pair for pair in kernels if pair[1] != pair[2]]
        self._direct = [(vars(part), True, vars(part)[DIRECT]) for part in parts if DIRECT in vars(part)]
        self._priority = current_platform.get_default_ir_op_priority(_as_eager(vllm_config))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While layers are called."""
        kernels = replaced("_forward_method", self._kernels)
        direct = replaced(DIRECT, self._direct)
        with self._priority.set_priority(), ir.enable_torch_wrap(False), kernels, direct:
            yield


def is_known(part: nn.Module) -> bool:
    """Whether it is one of `OPS`."""
    return isinstance(part, CustomOp) and getattr(type(part), "name", None) in OPS


def eager_kernel(op: Any) -> Any:
    """What vLLM would call in this place if it did not compile."""
    enforced, op._enforce_enable = op._enforce_enable, True
    try:
        return op.dispatch_forward(compile_native=False)
    finally:
        op._enforce_enable = enforced


def _as_eager(vllm_config: Any) -> Any:
    eager = copy.copy(vllm_config)
    eager.compilation_config = copy.copy(vllm_config.compilation_config)
    eager.compilation_config.mode = CompilationMode.NONE
    return eager
