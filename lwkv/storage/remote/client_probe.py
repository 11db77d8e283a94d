"""Whether an installed client has what a tier calls: one without starts and then fails in every call."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter

Needed = Mapping[str, Sequence[str]]
"""Dotted names inside a module, each with the parameters that are passed by name."""


def what_is_missing(module: object, needed: Needed) -> list[str]:
    """What `module` lacks of `needed`, in its order: names, and parameters as name(parameter)."""
    return [missing for name, parameters in needed.items() for missing in _missing(module, name, parameters)]


def version_of(package: str) -> str:
    """The version that is installed, for an error text."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def _missing(module: object, name: str, parameters: Sequence[str]) -> Iterator[str]:
    try:
        found = attrgetter(name)(module)
    except AttributeError:
        yield name
        return
    if parameters:
        taken = inspect.signature(found).parameters
        yield from (f"{name}({parameter})" for parameter in parameters if parameter not in taken)
