"""Pools of SGLang that no attention on a CPU reads are stored and loaded byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from integrations.in_sglang.pools_child import PAGED_KINDS
from integrations.in_sglang.rig import ENVIRONMENT


@pytest.fixture(scope="module")
def tried() -> subprocess.CompletedProcess[str]:
    """All kinds, one after the other in one process: to import SGLang takes most of the time."""
    command = [sys.executable, "-m", "integrations.in_sglang.pools_child"]
    return subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)


@pytest.mark.parametrize("kind", PAGED_KINDS)
def test_what_is_stored_from_a_pool_is_read_from_it_again(
    kind: str, tried: subprocess.CompletedProcess[str]
) -> None:
    assert kind in tried.stdout.splitlines(), tried.stderr[-5000:]
