"""The commands in ci leave the machine alone unless they are asked to install something."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TREE = Path(__file__).parent.parent
BARE = {"apt-get": 'echo "$@" >>"$LOG"', "id": "echo $USER_ID", "ldconfig": "true", "env": 'shift; "$@"'}
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
