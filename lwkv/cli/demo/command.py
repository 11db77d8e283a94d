"""The subcommand: its arguments, its files, its exit code."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch

from lwkv.cli.demo.arguments import DTYPES, add_model_arguments, dtype_name
from lwkv.cli.demo.findings import DemoFindings, Setting, median_run, sum_up
from lwkv.cli.demo.model_file import NamedModel, find_model, load_model
from lwkv.cli.demo.play import CHUNK_SIZE, Results, make_prompts, play
from lwkv.cli.demo.report import report_lines
from lwkv.cli.demo.restart import restart, tier_settings
from lwkv.cli.demo.restart_report import restart_lines
from lwkv.cli.platform_choice import why_chosen
from lwkv.cli.run_setup import core_for_transfers, make_writable
from lwkv.kernels import choose_kernels
from lwkv.platforms import Platform, detect_platform
from lwkv.reference.model_files.packages import require_package
from lwkv.telemetry.timeline_picture import draw_timeline
from lwkv.telemetry.timeline_trace import write_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, "demo-output")
    parser.add_argument(
        "--tier",
        metavar="TIER",
        help="answer the second of the two questions in a second process, from this tier: disk, a folder, "
        "or a URL such as valkey://host:6379",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo and print what it found. Returns 0, or 1 if an answer differs from full recompute.

    Raises ConfigError, ValueError or RuntimeError for what the user has to change: the platform, the model, a
    package that is missing, a folder that cannot be written to.
    """
    platform = detect_platform(args.platform)
    path = find_model(args.model)
    if args.tier is not None:
        return _run_restart(platform, path, args)
    require_package("matplotlib", "drawing a timeline")
    make_writable(args.output)
    with core_for_transfers(platform):
        found = _find(platform, path, args)
    print(json.dumps(asdict(found), indent=2) if args.json else "\n".join(report_lines(found)))
    return 1 if found.faults else 0


def _run_restart(platform: Platform, path: Path, args: argparse.Namespace) -> int:
    with tier_settings(args.tier, args.output) as tier:
        found = restart(path, args.platform, DTYPES[dtype_name(platform, args)], tier)
    print(json.dumps(asdict(found), indent=2) if args.json else "\n".join(restart_lines(found)))
    return 1 if found.faults else 0


def _find(platform: Platform, path: Path, args: argparse.Namespace) -> DemoFindings:
    dtype = dtype_name(platform, args)
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
        "cold": (
            results.cold,
            "Question 1: computed, and saved while it computes, small layers several at a time",
        ),
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
