"""What to do about a wrong value or an unknown key, where that can be guessed."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

from lwkv.config.engine_settings import ENGINE_SETTINGS
from lwkv.config.values import Allowed, ExtraConfig

_NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_QUOTED = re.compile(rf"\s*{_NUMBER}\s*")
_WITH_UNIT = re.compile(rf"\s*{_NUMBER}\s*([A-Za-z]+|%)\s*")
_WRITTEN_OTHERWISE = re.compile(r"\s*(?:0[xXoObB][0-9A-Fa-f]+|[0-9][0-9_, ]*[0-9])\s*")
VARIABLES_ONLY = ("config_file", "log_level", "platform", "remote_user", "remote_password")
"""What is read from a variable of this name, after `LWKV_` and in capitals, and is no setting."""
_GIB = 1 << 30


def hint_for_value(allowed: Allowed, value: object, default: object) -> str:
    """What to do about `value`, beginning with a semicolon; empty where nothing can be guessed."""
    if value is None or value == "":
        return f"; for the default ({_as_written(default)}) leave it out"
    if "number" not in allowed.kind:
        return ""
    if isinstance(value, str):
        return _hint_for_text(allowed.kind, value)
    if isinstance(value, list) and "numbers" not in allowed.kind:
        return "; write one number, with a point for fractions"
    is_bytes = allowed.kind == "number of GiB" and isinstance(value, (int, float)) and value >= _GIB
    return "; sizes are in GiB, not in bytes: divide by 1073741824" if is_bytes else ""


def _hint_for_text(kind: str, text: str) -> str:
    if _QUOTED.fullmatch(text):
        return "; write the number without quotes"
    if found := _WITH_UNIT.fullmatch(text):
        if found[1] == "%":
            return "; write a share of 1, as 0.15 for 15 %"
        _, _, unit = kind.partition(" of ")
        return "; write the number without a unit" + (f": it is in {unit}" if unit else "")
    if _WRITTEN_OTHERWISE.fullmatch(text):
        return "; write decimal digits, with a point for fractions and nothing between thousands"
    return ""


def _as_written(value: object) -> str:
    """A default in the words of a file."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else f"{value!r}"


def hint_for_key(key: str, value: object, known: Container[str]) -> str:
    """Where an unknown `key` belongs, in brackets; empty where that is not known. `known` are the others."""
    if key in ExtraConfig.model_fields:
        return f" (it is a key of extra_config: write extra_config: {{{key}: ...}})"
    if (engine := ENGINE_SETTINGS.get(key)) is not None:
        return f" (it is a setting for {engine.name} only: write it in {engine.place})"
    if key in VARIABLES_ONLY:
        return f" (it is read from the environment only: set LWKV_{key.upper()})"
    if isinstance(value, Mapping) and value and all(name in known for name in value):
        return " (settings are at the top level of the file: move them out of it)"
    return ""
