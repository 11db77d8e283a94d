"""The subcommand: its arguments, its files, its exit code."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch

from lwkv.demo.findings import Findings, Setting, median_run, sum_up
from lwkv.demo.model_file import NamedModel, find_model, load_model
from lwkv.demo.play import CHUNK_SIZE, Results, make_prompts, play
from lwkv.demo.report import report_lines
from lwkv.kernels import choose_kernels
from lwkv.picture import draw_timeline
from lwkv.platform_choice import why_chosen
from lwkv.platforms import Platform, detect_platform
from lwkv.platforms.registry import VARIABLE
from lwkv.reference.packages import require_package
from lwkv.trace import write_trace
from lwkv.workbench import core_for_transfers, make_writable

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="a GGUF file or a Hugging Face folder; by default SmolLM2"
    )
    parser.add_argument("--platform", metavar="NAME", help=f"run on this platform, whatever {VARIABLE} says")
    parser.add_argument("--dtype", choices=DTYPES, help="by default float32 on cpu, bfloat16 elsewhere")
    parser.add_argument(
        "--repeats", type=_count, default=5, metavar="N", help="runs of which a median is taken (5)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        metavar="DIR",
        help="where pictures and traces go (demo-output)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the demo and print what it found. Returns 0, or 1 if an answer differs from full recompute.

    Raises ConfigError, ValueError or RuntimeError for what the user has to change: the platform, the model, a
    package that is missing, a folder that cannot be written to.
    """
    platform = detect_platform(args.platform)
    path = find_model(args.model)
    require_package("matplotlib", "drawing a timeline")
    make_writable(args.output)
    with core_for_transfers(platform):
        found = _find(platform, path, args)
    print(json.dumps(asdict(found), indent=2) if args.json else "\n".join(report_lines(found)))
    return 1 if found.faults else 0


def _find(platform: Platform, path: Path, args: argparse.Namespace) -> Findings:
    dtype = args.dtype or ("float32" if platform.device_type == "cpu" else "bfloat16")
    named = load_model(path, platform.current_device(), DTYPES[dtype])
    prompts = make_prompts(named.tokenizer)
    results = play(named, platform, prompts, args.repeats)
    setting = _setting(platform, args.platform, named, dtype, args.repeats)
    found = sum_up(setting, results, named.tokenizer)
    return replace(found, files=[str(file) for file in _draw(results, args.output)])


def _setting(
    platform: Platform, override: str | None, named: NamedModel, dtype: str, repeats: int
) -> Setting:
    return Setting(
        platform=platform.name,
        why=why_chosen(override),
        device=str(named.model.device),
        kernels=choose_kernels(platform).name,
        threads=torch.get_num_threads(),
        model=named.name,
        dtype=dtype,
        num_layers=named.model.shape.num_layers,
        chunk_size=CHUNK_SIZE,
        repeats=repeats,
    )


def _draw(results: Results, folder: Path) -> Iterator[Path]:
    """Write a picture and a trace of the median run of both questions."""
    titles = {
        "cold": (results.cold, "Question 1: computed, and saved layer by layer"),
        "warm": (results.by_layers, "Question 2: loaded layer by layer while it computes"),
    }
    for name, (runs, title) in titles.items():
        run = median_run(runs)
        picture, trace = folder / f"{name}.png", folder / f"{name}.trace.json"
        draw_timeline(
            run.spans, picture, f"{title}; first token after {run.answer.first_token_s * 1e3:.1f} ms"
        )
        write_trace(run.spans, trace)
        yield from (picture, trace)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)
