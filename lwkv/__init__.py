"""lwkv: an LLM's KV cache moved one layer at a time, overlapped with the forward pass."""

__version__ = "0.1.0"
