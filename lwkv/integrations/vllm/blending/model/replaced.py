"""Attributes of modules that are others for the time of a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

Replacements: TypeAlias = Sequence[tuple[dict[str, Any], Any, Any]]
"""The attributes of a module; what is put there, and what was there."""


@contextmanager
def replaced(name: str, replacements: Replacements) -> Iterator[None]:
    """Have the attribute `name` of modules be another one; no setter of a module is called."""
    for attributes, other, _ in replacements:
        attributes[name] = other
    try:
        yield
    finally:
        for attributes, _, own in replacements:
            attributes[name] = own
