"""`lwkv demo`: a small model answers from a document whose KV cache is saved and loaded layer by layer."""

from __future__ import annotations

from lwkv.cli.demo.command import add_arguments, run

__all__ = ["add_arguments", "run"]
