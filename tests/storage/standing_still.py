"""A file system on which every call stands still, as on a mount whose server is gone."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from lwkv.storage.disk import folder, io, lock, names, reader, tier, writer

MODULES = (folder, io, lock, names, reader, tier, writer)
ALWAYS_THERE = ("getpid", "urandom", "fspath")


class StandingStill:
    """The disk tier's ways to the file system. While it is `still`, calls do not return; `callers` has the
    threads that made some."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._going = threading.Event()
        self._going.set()
        self.callers: set[threading.Thread] = set()
        for module in MODULES:
            for name, of in (("os", os), ("fcntl", fcntl)):
                if hasattr(module, name):
                    patch.setattr(module, name, _Gate(of, self))

    @contextmanager
    def still(self) -> Iterator[None]:
        self.callers.clear()
        self._going.clear()
        try:
            yield
        finally:
            self._going.set()

    def pass_through(self) -> None:
        if not self._going.is_set():
            self.callers.add(threading.current_thread())
            self._going.wait()


class _Gate:
    """A module, or `os.path`, whose functions wait."""

    def __init__(self, module: ModuleType, file_system: StandingStill) -> None:
        self._module, self._file_system = module, file_system

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if isinstance(found, ModuleType):
            return _Gate(found, self._file_system)
        if not callable(found) or isinstance(found, type) or name in (*ALWAYS_THERE, "join", "basename"):
            return found

        def wait_and_call(*arguments: Any, **options: Any) -> Any:
            self._file_system.pass_through()
            return found(*arguments, **options)

        return wait_and_call
