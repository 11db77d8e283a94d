"""Why a command runs on the platform it runs on."""

from __future__ import annotations

import os

from lwkv.platforms import platform_names
from lwkv.platforms.registry import VARIABLE


def why_chosen(asked_for: str | None) -> str:
    """Tell why `detect_platform(asked_for)` chose what it chose; `asked_for` comes from --platform."""
    if asked_for:
        return "it was asked for with --platform"
    if os.environ.get(VARIABLE):
        return f"{VARIABLE} asks for it"
    return f"the first that is available of {', '.join(platform_names())}"
