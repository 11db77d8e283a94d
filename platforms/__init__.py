"""Device types: what lwkv asks of one (`Platform`), and how to get the one of this machine."""

from __future__ import annotations

from lwkv.platforms.protocol import CopyBatch, Event, Features, Int64s, Platform, Stream
from lwkv.platforms.registry import (
    detect_platform,
    open_platform,
    platform_for,
    platform_names,
    platforms_with,
)

__all__ = [
    "CopyBatch",
    "Event",
    "Features",
    "Int64s",
    "Platform",
    "Stream",
    "detect_platform",
    "open_platform",
    "platform_for",
    "platform_names",
    "platforms_with",
]
