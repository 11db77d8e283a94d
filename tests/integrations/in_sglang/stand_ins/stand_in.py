"""Modules that SGLang imports and, on a CPU, never calls. A call is written down, and fails."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

CALLS = "STAND_IN_CALLS"
"""The environment variable with the name of the file that calls are written to."""


class Anything:
    """What a stand-in has under any name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> None:
        with open(os.environ[CALLS], "a") as calls:
            calls.write(f"{self._name}\n")
        raise RuntimeError(f"{self._name} was called, of a module that a test only stands in for")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)


class StandIn(types.ModuleType):
    """A module, or one inside it, that has everything."""

    __path__: list[str]

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds all that is inside a stand-in."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.startswith(f"{self._name}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> StandIn:
        module = StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in(name: str) -> None:
    """Make the module that calls this one a stand-in."""
    sys.meta_path.insert(0, Finder(name))
    module = sys.modules[name]
    module.__path__ = []
    module.__class__ = StandIn
