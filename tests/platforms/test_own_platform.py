"""A platform of another package, as docs/platforms.md shows it."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from python_path import python_path

from lwkv.platforms import Platform, open_platform, registry

TREE = Path(__file__).parents[2]
DOCUMENT = (TREE / "docs" / "platforms.md").read_text()
DEVICE = torch.device("cpu")  # torch knows no "npu" without its package
METADATA = "Metadata-Version: 2.1\nName: lwkv-npu\nVersion: 1.0\n"
CPU_AS_NPU = """
from lwkv.platforms.cpu import CPU

class NPU(CPU):
    name = "npu"
"""


def block_of(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT, re.M | re.S)
    return str(found)


def signatures() -> dict[str, inspect.Signature | None]:
    """Names as torch's own modules have them."""
    functions = [
        "is_available", "device_count", "current_device", "set_device", "current_stream", "set_stream",
        "synchronize", "mem_get_info",
    ]  # fmt: skip
    methods = [
        "Stream.wait_event", "Stream.wait_stream", "Stream.synchronize",
        "Event.record", "Event.query", "Event.synchronize", "Event.elapsed_time",
    ]  # fmt: skip
    anything = inspect.signature(lambda *arguments, **options: None)
    found: dict[str, inspect.Signature | None] = dict.fromkeys([*functions, *methods, "Event"], anything)
    for name in ("set_device", "current_stream"):
        found[name] = inspect.signature(lambda device=None: None)
    found["set_stream"] = inspect.signature(lambda stream: None)
    found["Stream"] = inspect.signature(lambda device=None, priority=0: None)
    return {**found, "Stream.npu_stream": None, "Stream.device_index": None}


@pytest.fixture
def package(tmp_path: Path) -> Callable[[str], Path]:
    """Write an installed package whose entry point is that of the document."""

    def write(source: str) -> Path:
        (name, value), *_ = re.findall(r'^(\w+) = "(.*)"$', block_of("toml"), re.M)
        (tmp_path / f"{value.partition(':')[0]}.py").write_text(source)
        info = tmp_path / "lwkv_npu-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(METADATA)
        (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{name} = {value}\n")
        return tmp_path

    return write


def test_the_three_names_make_a_platform(
    package: Callable[[str], Path],
    make_stub: Callable[..., Any],
    use_everything: Callable[[Any, torch.device], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(package(block_of("python")))
    original = torch.device

    class Device:
        def __new__(cls, kind: str, index: int | None = None) -> Any:
            return (kind, index) if kind == "npu" else original(kind, index)

    monkeypatch.setattr(torch, "device", Device)
    make_stub("npu", signatures())
    platform = open_platform("npu")
    assert (platform.name, platform.device_type) == ("npu", "npu")
    use_everything(platform, DEVICE)


def test_the_conformance_suite_runs_on_it(package: Callable[[str], Path]) -> None:
    command = "pytest --platform npu tests/platforms/test_conformance.py"
    assert command in DOCUMENT
    folder = package(CPU_AS_NPU)
    done = subprocess.run(
        [sys.executable, "-m", *command.split(), "-p", "no:cacheprovider", "-k", "batch or handle"],
        cwd=TREE,
        env=os.environ | {"PYTHONPATH": python_path(TREE, folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d\d passed", done.stdout)


def test_every_member_of_the_protocol_says_what_it_is() -> None:
    members = {name: member for name, member in vars(Platform).items() if not name.startswith("_")}
    assert [name for name, member in members.items() if not inspect.getdoc(member)] == []
