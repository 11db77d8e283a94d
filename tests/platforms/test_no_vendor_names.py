"""Only the platforms know the names of vendors' device modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lwkv

MODULES = {"cuda", "xpu", "musa", "hpu"}
QUESTIONS = {"is_cuda", "is_xpu", "is_musa", "is_hpu"}
ROOT = Path(lwkv.__file__).parent


def vendor_names(source: str) -> Iterator[str]:
    """Every use in Python source of `torch.<module>` or of a tensor's `is_<module>`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
            if node.attr in QUESTIONS or (of_torch and node.attr in MODULES):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and node.value in QUESTIONS:
            yield f"{node.lineno}: {node.value!r}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (f"{node.lineno}: import {name}" for name in imported(node) if is_vendors(name))


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return [prefix + alias.name for alias in node.names]


def is_vendors(name: str) -> bool:
    parts = name.split(".")
    return parts[0] in {"torch_musa", "habana_frameworks", "intel_extension_for_pytorch"} or (
        parts[0] == "torch" and len(parts) > 1 and parts[1] in MODULES
    )


def test_no_file_outside_the_platforms_names_a_vendors_module() -> None:
    files = [path for path in ROOT.rglob("*.py") if "platforms" not in path.relative_to(ROOT).parts]
    assert len(files) > 1
    found = [
        f"{path.relative_to(ROOT)}:{use}" for path in files for use in vendor_names(path.read_text("utf-8"))
    ]
    assert found == []


def test_uses_are_found_in_every_form() -> None:
    source = """
import torch.cuda
from torch import xpu
from torch.musa import Stream
import torch_musa
torch.cuda.synchronize()
tensor.is_cuda
getattr(tensor, "is_xpu")
"""
    assert [use.partition(":")[0] for use in vendor_names(source)] != []
    assert {int(use.partition(":")[0]) for use in vendor_names(source)} == {2, 3, 4, 5, 6, 7, 8}


def test_other_uses_of_the_words_are_allowed() -> None:
    source = 'device = torch.device("cuda"); kind = device.type == "xpu"; config.cuda = torch.float16'
    assert list(vendor_names(source)) == []
