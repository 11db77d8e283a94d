"""Packages that only loading a model needs."""

from __future__ import annotations

import importlib
from types import ModuleType

from lwkv.errors import ConfigError


def require_package(name: str, purpose: str) -> ModuleType:
    """Import an optional package. Raises ConfigError with the pip line if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{purpose} needs the package {name!r}: pip install {name}") from error
