"""lwkv: an LLM's KV cache moved one layer at a time, overlapped with the forward pass.

The public names are looked up on first use, so that importing the package does nothing and costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lwkv.config.settings import Config as Config
    from lwkv.connectors import CreateGPUConnector as CreateGPUConnector
    from lwkv.connectors import LayoutHints as LayoutHints
    from lwkv.engine import CacheEngine as CacheEngine
    from lwkv.engine import Request as Request
    from lwkv.errors import ClosedError as ClosedError
    from lwkv.errors import ConfigError as ConfigError
    from lwkv.errors import LayoutError as LayoutError
    from lwkv.errors import LwkvError as LwkvError
    from lwkv.errors import PlatformError as PlatformError
    from lwkv.errors import PlatformMissingError as PlatformMissingError
    from lwkv.errors import RequestError as RequestError
    from lwkv.layouts.layout import KVSpec as KVSpec
    from lwkv.metadata import CacheMetadata as CacheMetadata
    from lwkv.platforms import Platform as Platform
    from lwkv.platforms import detect_platform as detect_platform
    from lwkv.platforms import open_platform as open_platform
    from lwkv.steps import LayerSteps as LayerSteps
    from lwkv.steps import StepResult as StepResult
    from lwkv.telemetry.timeline import LoadTimes as LoadTimes
    from lwkv.telemetry.timeline import Span as Span
    from lwkv.telemetry.timeline import Timeline as Timeline
    from lwkv.telemetry.timeline import hidden_and_exposed as hidden_and_exposed
    from lwkv.telemetry.timeline_picture import draw_timeline as draw_timeline
    from lwkv.telemetry.timeline_trace import write_trace as write_trace
    from lwkv.transfer import NO_SLOT as NO_SLOT

__version__ = "0.1.0"

_HOMES = {
    "config.settings": "Config",
    "connectors": "CreateGPUConnector LayoutHints",
    "engine": "CacheEngine Request",
    "errors": "ClosedError ConfigError LayoutError LwkvError PlatformError PlatformMissingError RequestError",
    "layouts.layout": "KVSpec",
    "metadata": "CacheMetadata",
    "telemetry.timeline_picture": "draw_timeline",
    "platforms": "Platform detect_platform open_platform",
    "steps": "LayerSteps StepResult",
    "telemetry.timeline": "LoadTimes Span Timeline hidden_and_exposed",
    "telemetry.timeline_trace": "write_trace",
    "transfer": "NO_SLOT",
}

__all__ = sorted(["__version__", *" ".join(_HOMES.values()).split()])


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(f"lwkv.{home}"), name)
    raise AttributeError(f"lwkv has no {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
