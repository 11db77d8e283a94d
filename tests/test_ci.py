"""The commands in ci install nothing unless they are asked to, and CI runs all tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).parent.parent
BARE = {"apt-get": 'echo "$@" >>"$LOG"', "id": "echo $USER_ID", "ldconfig": "true", "env": 'shift; "$@"'}
PYTHON = """#!/bin/sh
[ "$2" != pytest ] || echo "$@"
"""
CALL = """
set -euo pipefail
stop() { echo "$*" >&2; exit 1; }
run_quietly() { shift; "$@"; }
source ci/servers.sh
install_servers
echo goes on
"""


def install_on_bare_machine(folder: Path, **settings: str) -> tuple[int, str, str]:
    """On a machine without servers: the exit status, what is said, and what apt-get was asked for."""
    for name, code in BARE.items():
        (folder / name).write_text(f"#!/bin/sh\n{code}\n")
        (folder / name).chmod(0o755)
    (folder / "grep").symlink_to("/bin/grep")
    asked = folder / "asked"
    done = subprocess.run(
        ["/bin/bash", "-c", CALL, "ci/test"],
        cwd=TREE,
        env={"PATH": str(folder), "LOG": str(asked), "USER_ID": "0", **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, asked.read_text() if asked.exists() else ""


def test_a_test_command_installs_nothing_unless_it_is_asked_to(tmp_path: Path) -> None:
    status, said, asked = install_on_bare_machine(tmp_path)
    assert (status, asked) == (0, "")
    assert "INSTALL_SERVERS=1 ci/test installs them, as root: the tests of remote tiers" in said
    assert said.endswith("goes on\n")


def test_what_is_asked_for_is_installed_and_nothing_is_upgraded(tmp_path: Path) -> None:
    status, said, asked = install_on_bare_machine(tmp_path, INSTALL_SERVERS="1")
    assert (status, said) == (0, "goes on\n")
    update, install = asked.splitlines()
    assert update == "update"
    assert install.startswith("install --yes --no-install-recommends --no-upgrade redis-server openssl lib")


@pytest.mark.parametrize("settings", [{}, {"INSTALL_SERVERS": "1", "USER_ID": "1000"}])
def test_where_servers_are_required_and_missing_the_command_stops(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    status, said, asked = install_on_bare_machine(tmp_path, REQUIRE_SERVERS="1", **settings)
    assert (status, asked) == (1, "")
    assert "INSTALL_SERVERS" in said
    assert "goes on" not in said


def test_ci_asks_for_servers_and_requires_them() -> None:
    assert "REQUIRE_SERVERS=1 INSTALL_SERVERS=1" in (TREE / ".ci" / "run").read_text()
    assert os.access(TREE / ".ci" / "run", os.X_OK)


def arguments_of_pytest(checkout: Path, *arguments: str) -> list[str]:
    """What `ci/test ARGUMENTS` gives to pytest, in a checkout whose programs do nothing."""
    (checkout / "lwkv" / "platforms").mkdir(parents=True)
    (checkout / "pyproject.toml").touch()
    shutil.copytree(TREE / "ci", checkout / "ci")
    programs = checkout / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "ruff", "mypy"):
        (programs / name).write_text(PYTHON if name == "python" else "#!/bin/sh\n")
        (programs / name).chmod(0o755)
    settings = {"REQUIRE_SERVERS": "", "INSTALL_SERVERS": ""}
    command = ["/bin/bash", checkout / "ci" / "test", *arguments]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True)
    before, given = done.stdout.split(" --timeout 900")
    assert before == "-m pytest"
    return given.split()


def test_only_a_run_without_arguments_leaves_slow_tests_out(tmp_path: Path) -> None:
    quick = arguments_of_pytest(tmp_path / "quick")
    everything = arguments_of_pytest(tmp_path / "all", "--all")
    assert quick == [*everything, "-m", "not", "slow"]
    assert "-m" not in everything
    assert not [word for word in everything if "--all" in word]


@pytest.mark.parametrize(
    ("arguments", "given"),
    [(("--all", "-x"), ["-x"]), (("tests/a.py", "-k", "b"), ["tests/a.py", "-k", "b"])],
)
def test_arguments_go_to_pytest(tmp_path: Path, arguments: tuple[str, ...], given: list[str]) -> None:
    everything = arguments_of_pytest(tmp_path / "all", "--all") if "--all" in arguments else []
    assert arguments_of_pytest(tmp_path / "some", *arguments) == [*everything, *given]


STARTED = ["test --all", "sglang ", "vllm -k hybrid_s", "vllm -k not hybrid_s"]
"""What CI starts; of vLLM's tests each is in one of the two halves."""


@pytest.mark.parametrize("failing", ["", *STARTED])
def test_ci_runs_all_tests_also_those_inside_engines_and_fails_where_one_does(
    tmp_path: Path, failing: str
) -> None:
    for folder in (".ci", "ci"):
        (tmp_path / folder).mkdir()
    shutil.copy(TREE / ".ci" / "run", tmp_path / ".ci")
    for command in ("test", "sglang", "vllm"):
        text = f'echo "{command} $*" | tee -a "$LOG"; [ "{command} $*" != "$FAILING" ]\n'
        (tmp_path / "ci" / command).write_text(text)
    log = tmp_path / "log"
    done = subprocess.run(
        ["/bin/bash", tmp_path / ".ci" / "run"],
        env={**os.environ, "LOG": str(log), "FAILING": failing},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == (not failing)
    started = log.read_text().splitlines()
    wanted = STARTED[:1] if failing == STARTED[0] else STARTED
    assert sorted(started) == sorted(wanted)
    assert sorted(done.stdout.splitlines()) == sorted(wanted), "what all print is seen"


def test_every_file_is_counted_in_one_part() -> None:
    done = subprocess.run([sys.executable, TREE / "ci" / "count"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "core" in done.stdout
    assert re.search(r"functions: median [\d.]+ lines, 9\d% under 20", done.stdout)
    assert re.search(r"modules over 200 lines: \d+ of \d+", done.stdout)
