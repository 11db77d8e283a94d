"""What the documents name is there, and the tables of waits are complete."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
from properties.test_ordering import WAITS

TREE = Path(__file__).parent.parent
ARCHITECTURE = (TREE / "docs" / "architecture.md").read_text()
HOMES = {
    "Lane": "lwkv.connectors.lane",
    "Platform": "lwkv.platforms",
    "Loader": "lwkv.connectors.loader",
    "Saver": "lwkv.connectors.saver",
    "PagedConnector": "lwkv.connectors.paged",
    "BufferConnector": "lwkv.connectors.buffer",
    "StorageManager": "lwkv.storage.manager",
}


def test_every_wait_has_a_line_in_the_tables() -> None:
    text = " ".join(ARCHITECTURE.split())
    assert [name for name in WAITS if name not in text] == []


def test_every_method_that_is_named_exists() -> None:
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", ARCHITECTURE)
    assert len(named) > 10
    for owner, method in named:
        assert callable(getattr(getattr(import_module(HOMES[owner]), owner), method))


def test_every_test_that_is_named_exists() -> None:
    source = "".join(path.read_text() for path in (TREE / "tests" / "properties").glob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", ARCHITECTURE)
    assert named
    assert [name for name in named if f"def {name}(" not in source] == []


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/architecture.md",
        "docs/config.md",
        "docs/tiers.md",
        "docs/remote.md",
        "docs/blending.md",
        "docs/vllm.md",
        "docs/coming-from-lmcache.md",
        "CHANGELOG.md",
    ],
)
def test_every_file_that_is_named_exists(document: str) -> None:
    text = (TREE / document).read_text()
    named = set(re.findall(r"`((?:lwkv|platforms|tests|docs|ci|benchmarks)/[\w./-]*)`", text))
    links = {link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link}
    paths = [TREE / path for path in named] + [(TREE / document).parent / link for link in links]
    assert [path for path in paths if not path.exists()] == []
