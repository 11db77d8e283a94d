"""CacheBlend: segments reused wherever they stand in a prompt, and a few of their tokens computed again."""

from __future__ import annotations

from lwkv.blend.blender import Blended, Blender
from lwkv.blend.model import BlendModel
from lwkv.blend.request import BlendRequest, Segment
from lwkv.blend.segments import Separator
from lwkv.blend.selector import (
    AllTokens,
    Deviation,
    FirstTokens,
    NoTokens,
    QueryAttention,
    RandomTokens,
    Selector,
)
from lwkv.blend.shared_prefix import SharedPrefix

__all__ = [
    "AllTokens",
    "BlendModel",
    "BlendRequest",
    "Blended",
    "Blender",
    "Deviation",
    "FirstTokens",
    "NoTokens",
    "QueryAttention",
    "RandomTokens",
    "Segment",
    "Selector",
    "Separator",
    "SharedPrefix",
]
