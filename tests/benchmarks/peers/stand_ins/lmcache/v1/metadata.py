from __future__ import annotations

from typing import Any


def LMCacheMetadata(**values: Any) -> dict[str, Any]:
    return values
