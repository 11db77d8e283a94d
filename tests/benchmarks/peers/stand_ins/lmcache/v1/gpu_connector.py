from __future__ import annotations

from typing import Any


def CreateGPUConnector(config: Any, metadata: Any, engine: Any) -> tuple[Any, Any, Any]:
    return config, metadata, engine
