"""The arguments that every command with a model takes."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from lwkv.cli.demo.model_file import NamedModel, find_model, load_model
from lwkv.platforms import Platform
from lwkv.platforms.registry import VARIABLE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_model_arguments(parser: argparse.ArgumentParser, output: str) -> None:
    """Add what chooses model, device and output; `output` is the usual folder."""
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="a GGUF file or a Hugging Face folder; by default SmolLM2"
    )
    parser.add_argument("--platform", metavar="NAME", help=f"run on this platform, whatever {VARIABLE} says")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="the model's dtype; by default float32 on cpu, bfloat16 elsewhere"
    )
    parser.add_argument(
        "--repeats", type=_count, default=5, metavar="N", help="runs of which a median is taken (5)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(output),
        metavar="DIR",
        help=f"where pictures and traces go ({output})",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def dtype_name(platform: Platform, args: argparse.Namespace) -> str:
    """The name of the dtype asked for, or the platform's usual one."""
    return args.dtype or ("float32" if platform.device_type == "cpu" else "bfloat16")


def load_chosen(platform: Platform, args: argparse.Namespace) -> NamedModel:
    """Load the model asked for. Raises ConfigError as `find_model` and `load_model`."""
    dtype = DTYPES[dtype_name(platform, args)]
    return load_model(find_model(args.model), platform.current_device(), dtype)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)
