"""Nothing of what runs on another platform goes by way of torch.cuda."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from python_path import python_path

TREE = Path(__file__).parents[2]


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = ours | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(TREE, "tests")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "poisoned_cuda", *arguments]
    return subprocess.run(command, cwd=TREE, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_saves_and_loads_on_the_host_never_ask_torch_cuda() -> None:
    paths = ("engine", "test_steps.py", "connectors/test_buffer.py", "reference/test_connect.py")
    chosen = "comes_back or fails_costs or test_buffer or test_connect or (test_steps and not any_order)"
    done = run_pytest("--platform", "cpu", *(f"tests/{path}" for path in paths), "-k", chosen)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("guard", ["contextlib.nullcontext()", "contextlib.suppress(BaseException)"])
def test_the_poison_works(tmp_path: Path, guard: str) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(
        f"import contextlib, torch\ndef test_it():\n    with {guard}:\n        torch.cuda.is_available()\n"
    )
    done = run_pytest(str(test))
    assert done.returncode == 1
    assert "read of torch.cuda: ['is_available']" in done.stdout
