"""Imports as they stand in the text, those for type checkers and those within functions included."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from glob import glob
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

TREE = Path(__file__).parent.parent
# It knows no other module, so that platforms, which may have threads, can use it.
APART = "lwkv.background.exit"
# Each may import what stands behind it, and nothing before. The rest may do as it likes, but in no circle.
ORDER: list[set[str]] = [
    {"integrations"},
    {"hybrid"},
    {"steps"},
    {"engine"},
    {"pipeline", "shared_host"},
    {"connectors", "storage"},
    {"codecs"},
    {"kernels", "pool", "request"},
    {"layouts", "batch_slots"},
    {"transfer"},
    {"keys"},
    {"config", "metadata", "background", "kinds"},
    {"telemetry"},
    {"platforms"},
    {"errors", APART},
]
Graph = Mapping[str, set[str]]


def modules() -> dict[str, Path]:
    """All of lwkv by name; glob, unlike Path.rglob, looks into the linked folder."""
    found = glob("**/*.py", root_dir=TREE / "lwkv", recursive=True)
    names = (f"lwkv.{name.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__") for name in found)
    return {
        name: TREE / "lwkv" / path
        for name, path in zip(names, found, strict=True)
        if not name.startswith("lwkv.benchmarks")
    }


def imported(text: str, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules among `known` that a module's text imports; a name from a package is the package's."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            assert node.level == 0, "imports are written from the top"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


@cache
def graph() -> Graph:
    known = modules()
    return {name: set(imported(path.read_text(), known)) - {name} for name, path in known.items()}


def by_folder(imports: Graph) -> Graph:
    """The same of folders, and of the modules that lie in none."""
    folders: dict[str, set[str]] = defaultdict(set)
    for importer, names in imports.items():
        for name in names:
            if _folder(name) != _folder(importer):
                folders[_folder(importer)].add(_folder(name))
    return folders


def _folder(module: str) -> str:
    if module == APART:
        return module
    return [*module.split("."), ""][1]


def circle(imports: Graph) -> list[str]:
    """Modules that import each other in a circle, the first one again at the end; none if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def wrong_ways(folders: Graph) -> list[tuple[str, str]]:
    """Folders that import one that stands before them, or beside."""
    place = {folder: number for number, beside in enumerate(ORDER) for folder in beside}
    return [
        (importer, name)
        for importer, names in folders.items()
        for name in names
        if importer in place and name in place and place[name] <= place[importer]
    ]


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circle(graph()) == []


def test_no_folder_imports_itself_by_way_of_others() -> None:
    assert circle(by_folder(graph())) == []


def test_folders_import_in_the_order_of_the_design() -> None:
    assert wrong_ways(by_folder(graph())) == []


def test_what_is_ordered_is_there() -> None:
    folders = {_folder(name) for name in modules()}
    assert set.union(*ORDER) <= folders


@pytest.mark.parametrize(
    "text",
    [
        "import lwkv.engine",
        "from lwkv.engine import CacheEngine",
        "from lwkv import engine",
        "if TYPE_CHECKING:\n    from lwkv.engine import CacheEngine",
        "def late():\n    import lwkv.engine",
    ],
)
def test_every_way_to_import_is_seen(text: str) -> None:
    assert list(imported(text, modules())) == ["lwkv.engine"]


def test_a_circle_and_a_wrong_way_would_be_found() -> None:
    ring = {name: {after} for name, after in pairwise(["a", "b", "c", "a"])}
    assert set(circle(ring)) == {"a", "b", "c"}
    assert wrong_ways({"pool": {"pipeline", "platforms"}, "storage": {"connectors"}}) == [
        ("pool", "pipeline"),
        ("storage", "connectors"),
    ]
