"""What `--help` shows, of every command that lwkv has."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module

import pytest

from lwkv.cli import main as cli

MODULES = (
    "blend_quality",
    "move_trace",
    "sglang_ttft",
    "vllm_conversations",
    "vllm_report",
    "vllm_scheduler",
    "vllm_serving",
    "vllm_starts",
    "vllm_ttft",
)


class _ShownError(Exception):
    """Carries the parser instead of its answer."""


def _show(parser: argparse.ArgumentParser, *arguments: object) -> None:
    raise _ShownError(parser)


def shown(program: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of a command, or of a module of `lwkv.benchmarks`."""
    start = partial(cli.main, program[1:]) if program[0] == "lwkv" else import_module(program[0]).main
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", _show)
        patch.setattr(sys, "argv", list(program))
        with pytest.raises(_ShownError) as caught:
            start()
    parser: argparse.ArgumentParser = caught.value.args[0]
    return parser


@pytest.mark.parametrize(
    "program",
    [*(("lwkv", command) for command in cli.COMMANDS), *((f"lwkv.benchmarks.{name}",) for name in MODULES)],
    ids=" ".join,
)
def test_every_command_and_option_says_what_it_is_for(program: tuple[str, ...]) -> None:
    parser = shown(program)
    assert parser.description
    assert len(parser.description.split()) > 4
    for action in parser._actions:
        assert action.help, f"{action.option_strings} has no help"
        assert len(action.help.split()) > 1 or action.dest == "prefix"
    assert "usage:" in parser.format_help()
