from __future__ import annotations

import os
import subprocess
import sys
from glob import glob
from pathlib import Path

import pytest
from python_path import python_path

TREE = Path(__file__).parent.parent
# glob, unlike Path.rglob, looks into the linked folders.
EVERYTHING = [
    f"lwkv.{path.removesuffix('.py').replace('/', '.')}"
    for path in sorted(glob("**/*.py", root_dir=TREE / "lwkv", recursive=True))
]
WATCH = """
import os, threading, torch
asked = []
class Watched(os._Environ):
    def __getitem__(self, key):
        asked.append(key)
        return super().__getitem__(key)
os.environ.__class__ = Watched
import importlib
for name in %r:
    try:
        importlib.import_module(name.removesuffix(".__init__"))
    except ImportError as error:  # of a package that is optional
        assert error.name and error.name.split(".")[0] != "lwkv", error
%s
wrong = [key for key in asked if "LWKV" in str(key)]
assert not wrong, f"read from the environment: {wrong}"
assert threading.active_count() == 1, threading.enumerate()
assert not (torch.cuda.is_initialized() or torch.xpu.is_initialized()), "a device was touched"
"""


def run_python(code: str, where: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": python_path(TREE)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True)


def test_the_tree_runs_without_being_installed(tmp_path: Path) -> None:
    code = "import lwkv, lwkv.platforms; print(lwkv.platforms.__file__)"
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(TREE / "lwkv" / "platforms" / "__init__.py")


@pytest.mark.parametrize("modules", [["lwkv"], EVERYTHING], ids=["lwkv", "everything"])
def test_importing_touches_no_device_reads_no_environment_and_starts_no_thread(
    modules: list[str], tmp_path: Path
) -> None:
    done = run_python(WATCH % (modules, ""), tmp_path)
    assert done.returncode == 0, done.stderr


WITHOUT_LINUX = """
import fcntl, os, select, socket, torch
for module, words in ((fcntl, ("SEAL",)), (os, ("memfd", "MFD_", "eventfd", "EFD_", "pidfd")),
                      (select, ("epoll", "EPOLL", "POLLRDHUP")), (socket, ("SO_PEERCRED",))):
    for name in [name for name in dir(module) if any(word in name for word in words)]:
        delattr(module, name)
import lwkv.engine, lwkv.cli.main
from lwkv.shared_host.client.connecting import connect
from lwkv.shared_host.greeting import Hello
from lwkv.shared_host.owner.address import Address
for call in (lambda: Address("/nowhere"), lambda: connect("/nowhere", Hello(4096), 1.0, print)):
    try:
        call()
    except lwkv.errors.ConfigError as error:
        print(error)
"""


def test_the_library_can_be_imported_where_the_memory_of_a_node_cannot_be_had(tmp_path: Path) -> None:
    done = run_python(WITHOUT_LINUX, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("lacks os.memfd_create, os.eventfd, os.pidfd_open; leave host_memory out") == 2


def test_the_watch_of_the_environment_works(tmp_path: Path) -> None:
    done = run_python(WATCH % ([], "os.environ.get('LWKV_PLATFORM')"), tmp_path)
    assert "read from the environment: ['LWKV_PLATFORM']" in done.stderr


def test_importing_the_package_alone_imports_nothing_else(tmp_path: Path) -> None:
    code = "import sys, lwkv; print([name for name in sys.modules if name.startswith(('lwkv', 'torch'))])"
    done = run_python(code, tmp_path)
    assert done.stdout.strip() == "['lwkv']"
