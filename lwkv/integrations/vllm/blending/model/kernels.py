"""vLLM's own kernels for layers that are called outside its compiled pass.

Where vLLM compiles its model, norms, activations and rotary embeddings are written in plain PyTorch, for the
compiler to fuse: called as they stand, they launch several kernels each, or are compiled anew.
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

OPS = ("rms_norm", "silu_and_mul", "rotary_embedding")
"""vLLM's names for them."""


class EagerKernels:
    """Puts in place what vLLM uses with `--enforce-eager`; with that, nothing changes.

    Args:
        layers: of the decoder.
    """

    def __init__(self, layers: Sequence[nn.Module], vllm_config: Any) -> None:
        ops = {id(part): part for layer in layers for part in layer.modules() if _is_known(part)}
        with set_current_vllm_config(vllm_config):
            pairs = [(vars(op), _kernel(op), op._forward_method) for op in ops.values()]
        self._pairs = [pair for pair in pairs if pair[1] != pair[2]]
        self._priority = current_platform.get_default_ir_op_priority(_as_eager(vllm_config))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While layers are called."""
        with self._priority.set_priority(), ir.enable_torch_wrap(False):
            for attributes, kernel, _ in self._pairs:
                attributes["_forward_method"] = kernel
            try:
                yield
            finally:
                for attributes, _, own in self._pairs:
                    attributes["_forward_method"] = own


def _is_known(part: nn.Module) -> bool:
    return isinstance(part, CustomOp) and getattr(type(part), "name", None) in OPS


def _kernel(op: Any) -> Any:
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
