"""A disk that stops answering, or loses its files, while an engine of this process uses it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lwkv.storage.disk.reader import DiskReader

LONG_S = 120.0


class FaultyDisk:
    """Reads and look-ups wait while it is frozen, in every tier on disk of this process.

    Args:
        calls: those of DiskReader that wait.
    """

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, calls: Sequence[str] = ("read_run", "is_there")
    ) -> None:
        self._folder = folder
        self._goes_on = threading.Event()
        self._goes_on.set()
        self.waited = 0
        for name in calls:
            patch.setattr(DiskReader, name, self._waiting(getattr(DiskReader, name)))

    def freeze(self) -> None:
        self._goes_on.clear()

    def thaw(self) -> None:
        self._goes_on.set()

    def lose_all(self) -> None:
        """Remove every file, as whoever cleans up does."""
        for path in self._folder.rglob("*"):
            if path.is_file() and path.stat().st_size > 4096:
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder itself."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _waiting(self, call: Any) -> Any:
        def wait(reader: DiskReader, *arguments: Any) -> Any:
            self.waited += not self._goes_on.is_set()
            assert self._goes_on.wait(LONG_S)
            return call(reader, *arguments)

        return wait
