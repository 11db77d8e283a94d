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
        "Show what is installed, the settings, the platform, its link speed and the tiers; exit with 1 if "
        "something cannot work",
    ),
    "demo": (
        "lwkv.cli.demo.command",
        "Answer two questions with a small model, with and without its KV cache (docs/demo.md)",
    ),
    "inspect": ("lwkv.cli.inspect", "Show what is in the folder of a disk tier, check it, clean it up"),
    "blend-demo": (
        "lwkv.cli.demo.blend.command",
        "Reuse documents in another order with a small model, and compare (docs/blending.md)",
    ),
    "host": ("lwkv.cli.host", "Own host memory that the engines of this machine share"),
    "bench": (
        "lwkv.benchmarks.bench.command",
        "Measure loads, saves and their overlap, and the link itself (docs/benchmarks.md)",
    ),
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
    parser = argparse.ArgumentParser(
        prog="lwkv",
        description="Keeps the KV cache of an LLM in host memory, on disk and in remote stores.",
        epilog="lwkv COMMAND --help shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"lwkv {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show an error with its Python traceback")
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
