"""The stand-ins are fixtures: what SGLang does in these tests, it does without them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from integrations.in_sglang.rig import ENVIRONMENT


@pytest.mark.parametrize("module", ["sgl_kernel", "torchvision"])
def test_a_call_of_a_stand_in_fails_and_is_written_down(module: str, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    environment = {**os.environ, **ENVIRONMENT, "STAND_IN_CALLS": str(calls)}
    code = f"import {module}; from {module}.inside.deep import thing; thing.of.any_name(1)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "stands in" in done.stderr
    assert calls.read_text() == f"{module}.inside.deep.thing.of.any_name\n"
