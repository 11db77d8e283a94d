from __future__ import annotations

import argparse
import io
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lwkv import __version__
from lwkv.cli import main as cli
from lwkv.errors import ConfigError


def command(error: Exception | type[BaseException]) -> SimpleNamespace:
    def run(args: argparse.Namespace) -> int:
        raise error

    return SimpleNamespace(add_arguments=lambda parser: None, run=run)


@pytest.mark.parametrize(
    "error", [ConfigError("bad\n  value"), ValueError("bad value"), RuntimeError("bad value")]
)
def test_a_users_error_is_one_line_and_exit_code_2(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "import_module", lambda name: command(error))
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr() == ("", "lwkv: bad value\n")


def test_a_terminal_sees_a_sign_of_life_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", shown)

    def load(name: str) -> SimpleNamespace:
        assert shown.getvalue() == "lwkv demo: starting\n"
        return SimpleNamespace(add_arguments=lambda parser: None, run=lambda args: 0)

    monkeypatch.setattr(cli, "import_module", load)
    assert cli.main(["demo"]) == 0


def test_traceback_shows_the_error_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "import_module", lambda name: command(ValueError("bad value")))
    with pytest.raises(ValueError, match="bad value"):
        cli.main(["--traceback", "doctor"])


def test_an_error_of_the_program_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "import_module", lambda name: command(KeyError("a bug")))
    with pytest.raises(KeyError):
        cli.main(["doctor"])


def test_an_interrupt_ends_with_the_shells_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "import_module", lambda name: command(KeyboardInterrupt))
    assert cli.main(["doctor"]) == 130


def test_a_command_gets_its_own_arguments_and_gives_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        add_arguments=lambda parser: parser.add_argument("--code", type=int), run=lambda args: args.code
    )
    monkeypatch.setattr(cli, "import_module", lambda name: module)
    assert cli.main(["doctor", "--code", "7"]) == 7


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["doctor", "--nonsense"]])
def test_wrong_usage_exits_with_2_and_says_how_to_use_it(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith("usage: lwkv")


def test_help_lists_the_commands_and_the_version_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    for option, wanted in (("--help", "doctor"), ("--version", f"lwkv {__version__}")):
        with pytest.raises(SystemExit) as exit_:
            cli.main([option])
        assert exit_.value.code == 0
        assert wanted in capsys.readouterr().out


def test_help_of_a_command_is_that_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["doctor", "--help"])
    assert exit_.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from lwkv.cli import main; main._command_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_python_can_run_the_package() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lwkv", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"lwkv {__version__}\n"
