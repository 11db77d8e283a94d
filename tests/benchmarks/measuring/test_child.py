"""The process that engines are measured in."""

from __future__ import annotations

from pathlib import Path

import pytest

from lwkv.benchmarks.measuring.child import Child

ECHO = """
import json, os, sys
print(json.dumps({"arguments": json.loads(sys.argv[1]), "said": os.environ.get("SAID")}), flush=True)
for line in sys.stdin:
    if json.loads(line) == "end":
        sys.exit(1)
    print(line, end="", flush=True)
"""


@pytest.fixture
def module(tmp_path: Path) -> tuple[str, dict[str, str]]:
    """A module that says again what it is told, and the environment in which it is found."""
    (tmp_path / "echo_child.py").write_text(ECHO)
    return "echo_child", {"PYTHONPATH": str(tmp_path), "SAID": "so"}


def test_questions_are_answered_in_turn(module: tuple[str, dict[str, str]]) -> None:
    child = Child("echo", module[0], {"size": 3}, module[1])
    assert [child.ask(question) for question in (1, {"a": [2]})] == [1, {"a": [2]}]
    child.close()
    assert child._process.returncode == 0


def test_one_that_has_ended_is_named(module: tuple[str, dict[str, str]]) -> None:
    child = Child("echo", module[0], {}, module[1], own_session=True)
    with pytest.raises(RuntimeError, match="the engine 'echo' has ended"):
        child.ask("end")
    child.close()
    with pytest.raises(RuntimeError, match="the engine 'missing' has ended"):
        Child("missing", "no_such_module", {})
