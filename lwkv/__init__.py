"""lwkv: an LLM's KV cache moved one layer at a time, overlapped with the forward pass.

The public names are looked up on first use, so that importing the package does nothing and costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lwkv.config import Config
    from lwkv.connectors import CreateGPUConnector, LayoutHints
    from lwkv.engine import CacheEngine, Request
    from lwkv.errors import (
        ClosedError,
        ConfigError,
        LayoutError,
        LwkvError,
        PlatformError,
        PlatformMissingError,
        RequestError,
    )
    from lwkv.layout import KVSpec
    from lwkv.metadata import CacheMetadata
    from lwkv.picture import draw_timeline
    from lwkv.platforms import Platform, detect_platform, open_platform
    from lwkv.steps import LayerSteps, StepResult
    from lwkv.timeline import LoadTimes, Span, Timeline, hidden_and_exposed
    from lwkv.trace import write_trace
    from lwkv.transfer import NO_SLOT

__version__ = "0.1.0"

__all__ = [
    "NO_SLOT",
    "CacheEngine",
    "CacheMetadata",
    "ClosedError",
    "Config",
    "ConfigError",
    "CreateGPUConnector",
    "KVSpec",
    "LayerSteps",
    "LayoutError",
    "LayoutHints",
    "LoadTimes",
    "LwkvError",
    "Platform",
    "PlatformError",
    "PlatformMissingError",
    "Request",
    "RequestError",
    "Span",
    "StepResult",
    "Timeline",
    "__version__",
    "detect_platform",
    "draw_timeline",
    "hidden_and_exposed",
    "open_platform",
    "write_trace",
]

_HOMES = {
    "lwkv.config": ("Config",),
    "lwkv.connectors": ("CreateGPUConnector", "LayoutHints"),
    "lwkv.engine": ("CacheEngine", "Request"),
    "lwkv.errors": (
        *("ClosedError", "ConfigError", "LayoutError", "LwkvError"),
        *("PlatformError", "PlatformMissingError", "RequestError"),
    ),
    "lwkv.layout": ("KVSpec",),
    "lwkv.metadata": ("CacheMetadata",),
    "lwkv.picture": ("draw_timeline",),
    "lwkv.platforms": ("Platform", "detect_platform", "open_platform"),
    "lwkv.steps": ("LayerSteps", "StepResult"),
    "lwkv.timeline": ("LoadTimes", "Span", "Timeline", "hidden_and_exposed"),
    "lwkv.trace": ("write_trace",),
    "lwkv.transfer": ("NO_SLOT",),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"lwkv has no {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
