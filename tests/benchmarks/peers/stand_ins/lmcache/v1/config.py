from __future__ import annotations

from typing import Any


class LMCacheEngineConfig:
    @classmethod
    def from_defaults(cls, **settings: Any) -> dict[str, Any]:
        return settings
