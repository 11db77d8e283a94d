"""`lwkv host` in a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from shared_host.workers import status, wait_for

from lwkv.cli.main import main
from lwkv.shared_host.client.connecting import NoOwnerError


def test_it_owns_memory_until_it_is_told_to_end(tmp_path: Path) -> None:
    path = tmp_path / "host.sock"
    options = ["--size", "0.01", "--socket", path.name, "--threads", "2"]
    command = [sys.executable, "-m", "lwkv", "host", *options]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)

    def answers() -> bool:
        try:
            return status(path)["bytes"] == 5 * (2 << 20)
        except NoOwnerError:
            return False

    wait_for(answers)
    second = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert second.returncode == 2
    assert "another owner listens at" in second.stderr
    owner.send_signal(signal.SIGTERM)
    _, errors = owner.communicate(timeout=60)
    assert owner.returncode == 0
    # Engines run elsewhere: what is logged is what they are to have as host_memory.
    assert f" at {path}, taken" in errors
    assert re.fullmatch(r".* 0\.01 GiB of host memory at \S+, taken in \d\.\d s, 0\.0. GiB .*\n", errors)
    assert not path.exists()


def test_a_size_with_a_unit_is_refused_with_words() -> None:
    command = [sys.executable, "-m", "lwkv", "host", "--size", "40GB"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "--size: got '40GB'; allowed: a number of GiB without a unit, as in --size 40" in refused.stderr


@pytest.mark.parametrize("linger", ["5min", "-1", "nan", "0"])
def test_a_time_that_is_none_is_refused_with_what_is_allowed(
    linger: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["host", "--size", "1", f"--linger={linger}"])
    assert (
        f"argument --linger: got '{linger}'; allowed: a number of seconds above 0" in capsys.readouterr().err
    )


def test_a_socket_in_a_folder_that_is_missing_names_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["host", "--size", "0.01", "--socket", str(tmp_path / "none" / "host.sock")]) == 2
    assert (
        f"there is no folder {tmp_path / 'none'}; make it, or give another --socket"
        in capsys.readouterr().err
    )
