"""`lwkv blend-demo`: three documents cached one by one, asked in another order."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace

from lwkv.cli.demo.arguments import add_model_arguments, dtype_name, load_chosen
from lwkv.cli.demo.blend.picture import blend_lines, draw_curves
from lwkv.cli.demo.blend.play import (
    NUM_ANSWER,
    ORDER,
    QUESTION,
    BlendFindings,
    documents,
    num_runs,
    play,
    prepare,
)
from lwkv.cli.demo.blend.trial import Trial
from lwkv.cli.demo.progress import progress_bar
from lwkv.cli.run_setup import core_for_transfers, make_writable
from lwkv.platforms import Platform, detect_platform
from lwkv.reference.model_files.packages import require_package

# Tokens of the prompt beside the documents, at most.
_MARGIN = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, "blend-demo-output")


def run(args: argparse.Namespace) -> int:
    """Run the demo and print what it found. Returns 0, or 1 if blending everything is no full prefill.

    Raises ConfigError, ValueError or RuntimeError for what the user has to change: the platform, the model, a
    package that is missing, a folder that cannot be written to.
    """
    platform = detect_platform(args.platform)
    require_package("matplotlib", "drawing a picture")
    make_writable(args.output)
    with core_for_transfers(platform):
        found = _find(platform, args)
    picture = args.output / "blend.png"
    draw_curves(found, picture)
    found = replace(found, files=[str(picture)])
    print(json.dumps(asdict(found), indent=2) if args.json else "\n".join(blend_lines(found)))
    return 1 if found.faults else 0


def _find(platform: Platform, args: argparse.Namespace) -> BlendFindings:
    named = load_chosen(platform, args)
    longest = sum(len(named.tokenizer.encode(text)) for text in documents()) + _MARGIN + NUM_ANSWER
    with progress_bar("Preparing the engine", 1) as tick:
        trial = Trial(named.model, named.tokenizer, num_answer=NUM_ANSWER, longest=longest, platform=platform)
        tick(1)
    try:
        with progress_bar("Full prefill, and caching", 2) as tick:
            prepare(trial, tick)
        with progress_bar("Blending", num_runs(args.repeats)) as tick:
            ways, curves, faults = play(trial, args.repeats, tick)
        return BlendFindings(
            platform=platform.name,
            model=named.name,
            dtype=dtype_name(platform, args),
            question=QUESTION,
            order=list(ORDER),
            num_prompt=len(trial.tokens),
            num_reused=sum(end - start for start, end in trial.segments),
            ways=ways,
            curves=curves,
            faults=faults,
        )
    finally:
        trial.close()
