"""Runs what needs the simulated musa device in processes of their own.

torch's PrivateUse1 can be renamed once per process, and then everybody in it sees a `torch.musa`. So:

- `pytest` (the whole suite, on the cpu platform) collects this file alone from this folder. Its test starts
  `pytest --platform musa --musa-streams late` on PATHS, one process for each line of them since the device
  never gives cached memory back, and shows what that printed if it fails.
- `pytest --platform musa tests/simulated_musa PATH...` is that inner run; a path in this folder must be among
  its arguments. There conftest.py installs the simulated device before anything is collected, this file is
  ignored and the others are collected. `--musa-streams` can also be `early` (the default) or `delayed`.

The first run compiles the device (half a minute) into build/simulated_musa.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
MEMORY = "tests/simulated_musa/test_memory.py"
ARITHMETIC = "tests/properties/test_prefix_arithmetic.py::test"
LOADS = f"{ARITHMETIC}_loads_cover_what_is_cached_beyond_the_local_prefix_and_no_other_slot"
SOME_ARITHMETIC = (
    f"{LOADS}[full chunks-as vLLM has it]",
    f"{ARITHMETIC}_stores_leave_out_chunks_wholly_inside_the_masked_part[partial chunks too]",
)
PATHS = {
    "platform": ("tests/simulated_musa", "tests/platforms/test_conformance.py", "tests/kernels"),
    "engine": (MEMORY, "tests/engine", "tests/connectors/test_given_on.py", *SOME_ARITHMETIC),
    "steps": (
        MEMORY,
        "tests/test_steps.py",
        "tests/connectors/test_buffer.py",
        "tests/reference/test_connect.py",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", PATHS)
def test_the_platform_and_what_builds_on_it_work_on_the_simulated_device(
    simulator: ModuleType, part: str
) -> None:
    if simulator.compiler() is None:
        pytest.skip("there is no C++ compiler to build the simulated musa device with")
    options = ["-p", "no:cacheprovider", "--platform", "musa", "--musa-streams", "late"]
    command = [sys.executable, "-m", "pytest", *options, *PATHS[part]]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-12000:]}"
