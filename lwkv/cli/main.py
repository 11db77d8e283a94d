"""The `lwkv` command: finds the subcommand, and imports only its module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from lwkv import __version__
from lwkv.cli.demo.progress import say
from lwkv.errors import LwkvError
from lwkv.telemetry.log_level import follow_log_level

# Each module has `add_arguments(parser)` and `run(args) -> int`, the exit code.
COMMANDS = {
    "doctor": (
        "lwkv.cli.doctor.command",
        "Show what is installed, the platform and why, and its link speed",
    ),
    "demo": ("lwkv.cli.demo.command", "Run a small model with its KV cache loaded and saved layer by layer"),
    "inspect": ("lwkv.cli.inspect", "Tell what is in the folder of a disk tier, check it, clean it up"),
    "blend-demo": ("lwkv.cli.demo.blend.command", "Blend documents that a small model has cached one by one"),
    "host": ("lwkv.cli.host", "Own host memory that the engines of this machine share"),
    "bench": ("lwkv.benchmarks.command", "Measure loads, saves and their overlap against the link itself"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns its exit code; 2 for wrong input, which is reported in a line on stderr."""
    chosen, rest = _command_parser().parse_known_args(argv)
    try:
        if chosen.command != "doctor":  # which reports what is wrong with it, as with other settings
            follow_log_level()
        return _run(chosen.command, rest)
    except (LwkvError, ValueError, RuntimeError) as error:
        if chosen.traceback:
            raise
        print(f"lwkv: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lwkv", description="Moves an LLM's KV cache one layer at a time.")
    parser.add_argument("--version", action="version", version=f"lwkv {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        if find_spec(module):
            commands.add_parser(name, help=summary, add_help=False)
    return parser


def _run(command: str, arguments: Sequence[str]) -> int:
    name, summary = COMMANDS[command]
    say(f"lwkv {command}: starting")  # torch takes seconds to load
    module = import_module(name)
    parser = argparse.ArgumentParser(prog=f"lwkv {command}", description=summary)
    module.add_arguments(parser)
    code: int = module.run(parser.parse_args(arguments))
    return code
