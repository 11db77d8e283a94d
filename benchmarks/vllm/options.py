"""Options that all benchmarks of vLLM have."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from lwkv.benchmarks.measuring.shapes import SHAPES, Shape


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m lwkv.benchmarks.NAME`, with the shape and where results go."""
    parser = argparse.ArgumentParser(
        prog=f"python -m lwkv.benchmarks.{name}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="llama-8b", help="whose KV cache and layers"
    )
    parser.add_argument("--block-size", type=int, help="tokens of vLLM's blocks, if not as the shape says")
    output = Path(f"{name.replace('_', '-')}.json")
    parser.add_argument("--output", type=Path, default=output, help="file for the results")
    return parser


def shape_of(options: argparse.Namespace) -> Shape:
    """The shape that the options name, with their block size."""
    shape = SHAPES[options.shape]
    return replace(shape, block_size=options.block_size or shape.block_size)
