from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from python_path import python_path

from lwkv import __version__

TREE = Path(__file__).parent.parent


def run(*command: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, kind: str, out: Path) -> Path:
    run(sys.executable, "-m", "build", "--no-isolation", kind, "--outdir", out, source, cwd=out.parent)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(TREE, "--wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(TREE, "--sdist", tmp_path_factory.mktemp("sdist"))


def sources(*folders: str) -> list[Path]:
    """The Python files of folders of the tree, from its root; there must be some, or a test shows nothing."""
    found = {folder: sorted((TREE / folder).glob("**/*.py")) for folder in folders}
    assert all(found.values()), found
    return [path.relative_to(TREE) for paths in found.values() for path in paths]


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_the_package_the_platforms_and_the_licence_and_nothing_else(wheel: Path) -> None:
    files = contents(wheel)
    info = f"lwkv-{__version__}.dist-info"
    assert wheel.name == f"lwkv-{__version__}-py3-none-any.whl"
    assert {name.split("/")[0] for name in files} == {"lwkv", info}
    for path in sources("platforms", "benchmarks"):
        assert files[f"lwkv/{path}"] == (TREE / path).read_bytes()
    assert {"lwkv/py.typed", f"{info}/licenses/LICENSE"} <= set(files)
    assert not [name for name in files if "test" in Path(name).name or name.endswith((".pyc", ".so"))]


def test_the_metadata_names_the_licence_the_python_and_the_command(wheel: Path) -> None:
    files = contents(wheel)
    metadata = files[f"lwkv-{__version__}.dist-info/METADATA"].decode()
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Python: >=3.10\n" in metadata
    assert b"lwkv = lwkv.cli.main:main" in files[f"lwkv-{__version__}.dist-info/entry_points.txt"]


def test_the_installed_wheel_works_away_from_the_tree(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    pip_install = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index")
    run(*pip_install, "--target", target, wheel, cwd=tmp_path)
    code = "import lwkv, lwkv.platforms; print(lwkv.__file__); print(lwkv.platforms.__file__)"
    shown = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=python_path(target))
    assert shown.split() == [f"{target}/lwkv/__init__.py", f"{target}/lwkv/platforms/__init__.py"]
    version = run(target / "bin" / "lwkv", "--version", cwd=tmp_path, PYTHONPATH=python_path(target))
    assert version == f"lwkv {__version__}\n"


def test_the_source_archive_has_no_links_and_makes_the_same_wheel(
    wheel: Path, sdist: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive.getmembers() if not member.isfile()]
        archive.extractall(tmp_path, filter="data")
    again = build(tmp_path / sdist.name.removesuffix(".tar.gz"), "--wheel", tmp_path / "again")
    assert contents(again) == contents(wheel)


def test_the_source_archive_has_all_that_checks_it_and_no_build_leftovers(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    paths = sources("platforms", "benchmarks", "tests", "lwkv/reference")
    assert {str(path) for path in paths} <= names
    assert {f"lwkv/{path}" for path in sources("platforms", "benchmarks")} <= names
    assert {"pyproject.toml", "tox.ini", ".ci/run", "ci/test", "ci/demo", "ci/lint.txt"} <= names
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "docs/config.md"} <= names
    assert {str(path) for path in sources("examples")} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", ".git/"))]


def test_the_source_archive_checks_itself(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    tree = tmp_path / sdist.name.removesuffix(".tar.gz")
    without_install = "tests/test_import.py::test_the_tree_runs_without_being_installed"
    chosen = ("tests/platforms/test_no_vendor_names.py", "tests/cli/test_main.py", without_install)
    run(
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *chosen,
        cwd=tree,
        PYTHONPATH=python_path(tree),
    )
