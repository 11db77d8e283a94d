from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from lwkv.integrations import vllm as package
from lwkv.integrations.vllm.plugin import register

TREE = Path(__file__).parents[3]
LOADER = "vllm.model_executor.model_loader.base_loader"
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


class Factory:
    """As vLLM's: a name can be taken once."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[str, str]] = {}

    def register_connector(self, name: str, module: str, class_name: str) -> None:
        if name in self.known:
            raise ValueError(f"{name} is already registered")
        self.known[name] = module, class_name


def test_the_plugin_registers_the_connector_once_however_often_it_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for names in (FACTORY.split("."), LOADER.split(".")):
        for end in range(1, len(names) + 1):
            monkeypatch.setitem(sys.modules, ".".join(names[:end]), ModuleType(names[end - 1]))
    factory = sys.modules[FACTORY].KVConnectorFactory = Factory()  # type: ignore[attr-defined]
    sys.modules[LOADER].BaseModelLoader = type("Loader", (), {"load_model": None})  # type: ignore[attr-defined]
    register()
    register()
    assert factory.known == {"LWKVConnector": ("lwkv.integrations.vllm", "LWKVConnector")}


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    settings = (TREE / "pyproject.toml").read_text()
    group = settings.partition('[project.entry-points."vllm.general_plugins"]\n')[2].splitlines()[0]
    assert group == 'lwkv = "lwkv.integrations.vllm.plugin:register"'


def test_the_package_can_be_imported_without_vllm_and_names_what_it_has() -> None:
    assert package.__all__ == ["LWKVConnector"]
    with pytest.raises(AttributeError, match="LWKVConnector"):
        _ = package.LMCacheConnector  # type: ignore[attr-defined]
