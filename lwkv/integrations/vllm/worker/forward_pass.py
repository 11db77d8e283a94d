"""What vLLM says of the forward pass that a step is about to run."""

from __future__ import annotations

from typing import Any


def calls_hooks(forward_context: Any) -> bool:
    """Whether vLLM calls the hooks around layers in this forward pass.

    It does not where a CUDA graph of the whole model is replayed. vLLM's first model runner then names the
    mode, the second one has no attention metadata in its context.
    """
    mode = getattr(forward_context, "cudagraph_runtime_mode", None)
    is_whole_graph = getattr(mode, "name", "NONE") == "FULL"
    return getattr(forward_context, "attn_metadata", None) is not None and not is_whole_graph
