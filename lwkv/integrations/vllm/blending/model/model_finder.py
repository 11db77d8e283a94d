"""The model that vLLM has loaded in this process: no hook of a connector gives it.

`watch` has vLLM's loaders note each model that they load. lwkv's plug-in calls it in every worker. Where lwkv
is not installed but on the path, `worker_extension.py` does the same.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import nn

LOADERS = "vllm.model_executor.model_loader.base_loader"

# Of each model, what vLLM keeps of its layers, which is one object wherever its configuration goes.
_loaded: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def watch() -> None:
    """Note every model that is loaded from now on; once, however often it is called.

    It runs in every vLLM where lwkv is installed: vLLM's loaders are not imported for it, and one that loads
    models in another way is left alone.
    """
    if LOADERS in sys.modules:
        _watch(sys.modules[LOADERS])
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(MetaPathFinder):
    """Has vLLM's loaders watched when something imports them. A process that loads no model never does."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != LOADERS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)  # by all others
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _watch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _watch(module: Any) -> None:
    loader: Any = getattr(module, "BaseModelLoader", None)
    load_model = getattr(loader, "load_model", None)
    if load_model is None or hasattr(load_model, "notes_models"):
        return

    @wraps(load_model)
    def noted(self: Any, *arguments: Any, **more: Any) -> Any:
        model = load_model(self, *arguments, **more)
        vllm_config: Any = more.get("vllm_config", next(iter(arguments), None))
        if getattr(vllm_config, "kv_transfer_config", None) is not None:
            _loaded[model] = vllm_config.compilation_config
        return model

    noted.notes_models = True  # type: ignore[attr-defined]
    loader.load_model = noted


def loaded_model(vllm_config: Any) -> nn.Module | None:
    """The model whose layers this configuration knows; None for one that was not seen."""
    found = [model for model, known in _loaded.items() if known is vllm_config.compilation_config]
    return found[0] if len(found) == 1 else None
