"""`lwkv blend-demo`: three documents that a small model has cached one by one, asked in another order."""

from __future__ import annotations

from lwkv.cli.demo.blend.command import add_arguments, run

__all__ = ["add_arguments", "run"]
