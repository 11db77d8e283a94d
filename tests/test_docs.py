"""What the documents name exists, and the tables of waits are complete."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
from collections.abc import Iterator
from functools import reduce
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from cli.test_help import shown as shown_parser
from properties.test_ordering import WAITS

import lwkv
from lwkv.cli import main as commands
from lwkv.config.settings import Config
from lwkv.integrations.vllm.plugin import NAME as CONNECTOR

TREE = Path(__file__).parent.parent
ARCHITECTURE = (TREE / "docs" / "architecture.md").read_text()
DOCUMENTS = sorted([*TREE.glob("*.md"), *TREE.glob("docs/*.md")])
FOLDERS = "lwkv|platforms|tests|docs|ci|benchmarks|examples"
GROUPS = {"lwkv.tiers", "lwkv.platforms"}
"""Groups of entry points, which look like modules."""
HOMES = {
    "BatchRetrieval": "lwkv.pipeline.retrieval",
    "LayerSteps": "lwkv.steps",
    "Lane": "lwkv.connectors.lane",
    "Platform": "lwkv.platforms",
    "Loader": "lwkv.connectors.loader",
    "Saver": "lwkv.connectors.saver",
    "PagedConnector": "lwkv.connectors.paged",
    "BufferConnector": "lwkv.connectors.buffer",
    "BufferedLoader": "lwkv.connectors.buffered_load",
    "InPlaceLoader": "lwkv.connectors.turned_load",
    "StorageManager": "lwkv.storage.manager",
    "Order": "lwkv.integrations.sglang.order",
    "ModelStreams": "lwkv.integrations.sglang.order",
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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_is_named_exists(document: Path) -> None:
    text = document.read_text()
    code = " ".join(re.findall(r"`([^`\n]+)`", text))
    named = set(re.findall(rf"(?<![\w./-])(?:{FOLDERS})/[\w./-]*", code))
    links = {link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link}
    paths = [TREE / path for path in named] + [document.parent / link for link in links]
    assert [path for path in paths if not path.exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_heading_that_is_linked_exists(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text())
    wrong = [
        (path, anchor)
        for path, anchor in links
        if anchor not in anchors(document.parent / path if path else document)
    ]
    assert wrong == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_module_that_is_named_can_be_found(document: Path) -> None:
    """Dotted names in code, such as `lwkv.storage.tier.Status`; the left side of `old -> new` is history."""
    code = re.findall(r"`(?![^`\n]*`\s*(?:->|→))([^`\n]+)`", document.read_text())
    named = {name for text in code for name in re.findall(r"(?<![\w./-])lwkv(?:\.[A-Za-z_]\w*)+", text)}
    assert [name for name in sorted(named - GROUPS) if not is_there(name)] == []


@pytest.mark.parametrize("document", ["README.md", "docs/vllm.md"])
def test_the_command_for_vllm_names_the_connector_and_settings_that_there_are(document: str) -> None:
    (config,) = re.findall(r"--kv-transfer-config '(\{.*?\})'\n", (TREE / document).read_text(), re.DOTALL)
    transfer = json.loads(config)
    assert transfer.pop("kv_connector") == CONNECTOR
    assert transfer.pop("kv_role") == "kv_both"
    Config(**transfer.pop("kv_connector_extra_config"))
    assert transfer == {}


def test_the_readme_is_short() -> None:
    words = [word for word in (TREE / "README.md").read_text().split() if re.search(r"\w", word)]
    assert len(words) <= 700, "its code is counted, the lines of its tables are not"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_address_on_the_net_can_be_one(document: Path) -> None:
    text = document.read_text()
    for address in re.findall(r"\]\((\w+:[^)\s]*)\)", text):
        parts = urlsplit(address)
        assert parts.scheme == "https", address
        assert "." in parts.netloc, address


def test_every_picture_is_in_a_document() -> None:
    shown = "".join(path.read_text() for path in DOCUMENTS)
    assert [path.name for path in TREE.glob("docs/pictures/*") if path.name not in shown] == []


COMMANDS = [
    (document.name, line)
    for document in DOCUMENTS
    for block in re.findall(r"^ *```(?:sh|bash)\n(.*?)^ *```", document.read_text(), re.M | re.S)
    for line in re.sub(r"\\\n", " ", block).splitlines()
    if line.strip()
]
COMMANDS += [
    (document.name, " ".join(line.split()))
    for document in DOCUMENTS
    for line in re.findall(r"`((?:python -m lwkv[. ]|lwkv )[^`]*)`", document.read_text())
]


@pytest.mark.parametrize(("document", "line"), COMMANDS, ids=lambda text: text[:40])
def test_every_command_of_the_documents_names_programs_and_options_that_there_are(
    document: str, line: str
) -> None:
    """Of lwkv's own commands, scripts and modules; other programs are not here."""
    line = line.replace("python -m lwkv ", "lwkv ")
    for own in re.findall(r"(?:^|[|;&] *)((?:python -m lwkv\.|lwkv )[^|;&#]*)", line):
        words = shlex.split(own.strip())
        is_module = words[0] == "python"
        name = words[2] if is_module else words[1]
        assert is_there(name) if is_module else name in commands.COMMANDS
        options = options_of(words[:3] if is_module else words[:2])
        assert [word for word in words if word.startswith("--") and word.split("=")[0] not in options] == []
    for script in re.findall(r"(?:^|=1 )(ci/\w+)", line):
        assert os.access(TREE / script, os.X_OK)


def options_of(words: list[str]) -> set[str]:
    program = [words[2]] if words[0] == "python" else words
    return {option for action in shown_parser(program)._actions for option in action.option_strings}


def test_every_number_that_is_counted_is_in_the_documents(tmp_path: Path) -> None:
    named = set(re.findall(r"`(\w+)`", "".join(path.read_text() for path in DOCUMENTS)))
    counted = {name for path in TREE.glob("lwkv/*/**/*.py") for name in counted_in(path.read_text())}
    assert len(counted) > 20
    counted |= numbers_of_two_engines(str(tmp_path / "cache"))
    assert {"disk_get_us", "disk_put_bytes", "host_hits", "pins"} <= counted
    assert [name for name in sorted(counted) if name not in named and without_tier(name) not in named] == []


def numbers_of_two_engines(folder: str) -> set[str]:
    """What two engines report, of which one stores and the other loads from disk."""
    caches = [torch.randn(2, 8, 16, 2, 8).half() for _ in range(2)]
    metadata = lwkv.CacheMetadata("m", 2, 2, 8, torch.float16)
    config = Config(chunk_size=32, max_local_cpu_size=0.01, local_disk=folder, max_local_disk_size=0.1)
    request = {"tokens": list(range(64)), "slot_mapping": torch.arange(64)}
    names: set[str] = set()
    for stores in (True, False):
        with lwkv.CacheEngine.create(config, metadata, caches, layout_hints={"block_size": 16}) as engine:
            if stores:
                engine.store(**request)
            else:
                assert engine.retrieve(**request).all()
            assert engine.flush()
            names |= engine.stats().keys()
    return names


def counted_in(source: str) -> Iterator[str]:
    """The names that a module's text counts under, as far as they are written out."""
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("counters.add"):
            yield from (str(name.value) for name in call.args[:1] if isinstance(name, ast.Constant))


def without_tier(name: str) -> str:
    """A name without the tier before it and the step of a histogram behind it."""
    return re.sub("^(disk|host)_|_le_.*", "", name)


def anchors(document: Path) -> set[str]:
    """The anchors that a Markdown page has for its headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_there(name: str) -> bool:
    """Whether a dotted name leads to a module, or through a module to an attribute."""
    module, *attributes = import_as_far_as_possible(name)
    try:
        reduce(getattr, attributes, import_module(module))
    except AttributeError:
        return False
    return True


def import_as_far_as_possible(name: str) -> list[str]:
    """The longest part of a dotted name that is a module, and the names behind it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        if is_module(module):
            return [module, *parts[length:]]
    raise AssertionError(f"{name} has no module")


def is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
