"""A decoder layer as one function that calls its kernels, without the modules around them.

A layer has a dozen modules, and each call of one takes the host as long as launching a kernel. What a layer
does with them is traced once, from vLLM's own code: what depends on values is not traced, and stays a call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError
from torch.nn.functional import linear
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import (
    LinearBase,
    ReplicatedLinear,
    UnquantizedLinearMethod,
)

from lwkv.integrations.vllm.blending.model.kernels import eager_kernel, is_known

MODELS = "vllm.model_executor.models."
"""Where vLLM has what ties kernels together; a module from elsewhere is called as it is."""

# Positions, states, residual: the states and the residual behind the layer.
FlatLayer: TypeAlias = Callable[[Tensor, Tensor, Tensor], Any]

# What tracing raises for code that looks at values, or at types.
_NOT_TRACEABLE = (TraceError, TypeError, AttributeError, ValueError, RuntimeError, AssertionError)


def flat_layer(layer: nn.Module, vllm_config: Any) -> FlatLayer | None:
    """What `layer` does for states with a residual; None for one that cannot be traced.

    It is to be called while `EagerKernels` are in place, and only where nothing is hooked to its modules.
    Whether it gives the same is to be tried: what a layer does where a module gives None is not seen.
    """
    root, opened = _Root(layer), {layer}
    graph = _traced(root, opened)
    for child in layer.children():
        parts = {part for part in child.modules() if type(part).__module__.startswith(MODELS)}
        deeper = _traced(root, opened | parts) if parts else None
        if deeper is not None:
            opened, graph = opened | parts, deeper
    return None if graph is None else _compiled(graph, root, vllm_config)


class _Root(nn.Module):
    """Calls a layer as it is called from here: what else it takes has its default."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor) -> Any:
        return self.layer(positions, hidden, residual)


class _Tracer(fx.Tracer):
    """Goes into some modules only."""

    def __init__(self, opened: set[nn.Module]) -> None:
        super().__init__()
        self._opened = opened

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self._opened


def _traced(root: nn.Module, opened: set[nn.Module]) -> fx.Graph | None:
    try:
        graph = _Tracer(opened).trace(root)
    except _NOT_TRACEABLE:
        return None
    for node in reversed(graph.nodes):
        if node.target is operator.getitem and not node.users:
            graph.erase_node(node)
    # A tensor of the model's own would be the one that it had when it was traced.
    return None if any(node.op == "get_attr" for node in graph.nodes) else graph


def _compiled(graph: fx.Graph, root: nn.Module, vllm_config: Any) -> FlatLayer:
    names = SimpleNamespace()
    with set_current_vllm_config(vllm_config):
        for node in graph.nodes:
            if node.op == "call_module":
                _put(names, str(node.target), _direct(root.get_submodule(str(node.target))))
    code = graph.python_code("self")
    # What Python makes of a graph is a function of it and of what has the modules.
    exec(code.src, code.globals)
    return partial(code.globals["forward"], names)


def _put(names: SimpleNamespace, path: str, call: Callable[..., Any]) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        vars(names).setdefault(parent, SimpleNamespace())
        names = vars(names)[parent]
    vars(names)[last] = call


def _direct(part: Any) -> Callable[..., Any]:
    """What a module does when it is called."""
    if part._forward_pre_hooks or part._forward_hooks:
        return lambda *given, **named: part(*given, **named)
    if is_known(part):
        kernel: Callable[..., Any] = eager_kernel(part)
        return kernel
    own: Callable[..., Any] = part.forward
    return _linear(part) if isinstance(part, LinearBase) and _is_plain(part) else own


def _is_plain(part: Any) -> bool:
    """Whether a linear layer is one product, of which no rank has a part only."""
    alone = getattr(part, "tp_size", 1) == 1 or type(part) is ReplicatedLinear
    dispatch = getattr(utils, "dispatch_unquantized_gemm", None)
    is_default = dispatch is not None and dispatch() is getattr(utils, "default_unquantized_gemm", None)
    return alone and is_default and type(part.quant_method) is UnquantizedLinearMethod and part.return_bias


def _linear(part: Any) -> Callable[[Tensor], tuple[Tensor, Tensor | None]]:
    # Looked up at each call: weights that are loaded anew may be others.
    parameters, adds = part._parameters, not part.skip_bias_add

    def product(states: Tensor) -> tuple[Tensor, Tensor | None]:
        bias = parameters.get("bias")
        return linear(states, parameters["weight"], bias if adds else None), None if adds else bias

    return product
