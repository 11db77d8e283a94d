"""The model is noted when vLLM loads it."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lwkv.integrations.vllm.blending.model.model_finder import loaded_model, watch

LOADER = "vllm.model_executor.model_loader.base_loader"


class Loader:
    """As vLLM's, as far as it is looked at."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        return nn.Linear(1, 1)


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Any:
    names = LOADER.split(".")
    for end in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:end]), ModuleType(names[end - 1]))
    kind = type("BaseModelLoader", (Loader,), {})
    sys.modules[LOADER].BaseModelLoader = kind  # type: ignore[attr-defined]
    watch()
    once = kind.load_model
    watch()
    assert kind.load_model is once
    return kind()


def config(**more: Any) -> Any:
    return SimpleNamespace(**{"kv_transfer_config": object(), "compilation_config": object()} | more)


def test_a_model_is_found_by_what_its_configuration_knows_of_its_layers(loader: Any) -> None:
    first, second = config(), config()
    model = loader.load_model(vllm_config=first, model_config=None)
    other = loader.load_model(second, None, prefix="x")
    assert loaded_model(first) is model
    assert loaded_model(second) is other
    # As a connector inside vLLM gets it: a copy with the same parts.
    assert loaded_model(config(compilation_config=first.compilation_config)) is model
    assert loaded_model(config()) is None


def test_two_models_of_one_configuration_are_none(loader: Any) -> None:
    one = config()
    kept = [loader.load_model(one, None) for _ in range(2)]
    assert len(kept) == 2
    assert loaded_model(one) is None


def test_models_without_a_connector_are_not_noted_and_others_not_kept(loader: Any) -> None:
    without, one = config(kv_transfer_config=None), config()
    model = loader.load_model(without, None)
    assert loaded_model(without) is None
    model = loader.load_model(one, None)
    assert loaded_model(one) is model
    del model
    gc.collect()
    assert loaded_model(one) is None


def test_a_vllm_without_such_a_loader_starts_and_has_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has lwkv installed and does not blend must not notice."""
    names = LOADER.split(".")
    for end in range(1, len(names)):
        monkeypatch.setitem(sys.modules, ".".join(names[:end]), ModuleType(names[end - 1]))
    for lacks in (None, ModuleType("no_class"), SimpleNamespace(BaseModelLoader=object)):
        monkeypatch.setitem(sys.modules, LOADER, lacks)  # type: ignore[arg-type]
        watch()
        assert loaded_model(config()) is None


LOADERS = """
from torch import nn
class BaseModelLoader:
    def load_model(self, vllm_config, model_config, prefix=""):
        return nn.Linear(1, 1)
"""


def test_loaders_are_watched_when_something_imports_them_and_not_imported_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "vllm/model_executor/model_loader"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").write_text("")
    (folder / "base_loader.py").write_text(LOADERS)
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    before = len(sys.meta_path)
    watch()
    watch()
    assert len(sys.meta_path) == before + 1
    assert LOADER not in sys.modules
    loaders = import_module(LOADER)
    assert len(sys.meta_path) == before
    one = config()
    model = loaders.BaseModelLoader().load_model(one, None)
    assert loaded_model(one) is model
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        del sys.modules[name]


def test_loaders_that_are_called_in_another_way_load_all_the_same(loader: Any) -> None:
    class Other(Loader):
        def load_model(self, config: Any) -> nn.Module:  # type: ignore[override]
            return nn.Linear(1, 1)

    sys.modules[LOADER].BaseModelLoader = Other  # type: ignore[attr-defined]
    watch()
    assert isinstance(Other().load_model(config=config()), nn.Linear)
