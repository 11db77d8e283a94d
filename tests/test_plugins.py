"""The suite runs beside whatever pytest plugins are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from python_path import python_path

TREE = Path(__file__).parent.parent
PLUGIN = """
import warnings

def pytest_configure(config):
    warnings.warn("this plugin is switched off here")
"""
CODE = """
import warnings

def test_warns():
    warnings.warn("careless")
"""


def run_pytest(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=TREE,
        env=os.environ | {"PYTHONPATH": python_path(TREE, folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout


def test_a_plugin_that_warns_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "pytest_loud.py").write_text(PLUGIN)
    printed = run_pytest(tmp_path, "-p", "pytest_loud", "tests/test_import.py", "-k", "no_such_test")
    assert "INTERNALERROR" not in printed
    assert "deselected" in printed


def test_a_warning_of_a_test_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_careless.py").write_text(CODE)
    printed = run_pytest(tmp_path, "-c", "pyproject.toml", str(tmp_path / "test_careless.py"))
    assert "1 failed" in printed
    assert "UserWarning: careless" in printed
