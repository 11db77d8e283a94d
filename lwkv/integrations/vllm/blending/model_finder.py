"""The model that vLLM has loaded in this process: no hook of a connector gives it.

`watch` has vLLM's loaders note each model that they load. lwkv's plug-in calls it in every worker. Where lwkv
is not installed but on the path, `worker_extension.py` does the same.
"""

from __future__ import annotations

import weakref
from functools import wraps
from typing import Any

from torch import nn

# Of each model, what vLLM keeps of its layers, which is one object wherever its configuration goes.
_loaded: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def watch() -> None:
    """Note every model that is loaded from now on; once, however often it is called.

    It runs in every vLLM where lwkv is installed: one that loads models in another way is left alone.
    """
    try:
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    except ImportError:
        return
    load_model = getattr(BaseModelLoader, "load_model", None)
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
    BaseModelLoader.load_model = noted


def loaded_model(vllm_config: Any) -> nn.Module | None:
    """The model whose layers this configuration knows; None for one that was not seen."""
    found = [model for model, known in _loaded.items() if known is vllm_config.compilation_config]
    return found[0] if len(found) == 1 else None
