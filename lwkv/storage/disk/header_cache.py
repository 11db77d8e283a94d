"""What is known of chunk files that were read or written lately."""

from __future__ import annotations

import threading
from collections import OrderedDict

from lwkv.storage.disk.format import Header

MOST_HEADERS = 4096


Version = tuple[int, int]
"""A file's inode and time of change, in ns: the next file of the same name has others."""


class Headers:
    """Headers by the text of their key, so that not every layer reads its file's. Thread-safe."""

    def __init__(self) -> None:
        self._headers: OrderedDict[str, Header] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> Header | None:
        with self._lock:
            return self._headers.get(key)

    def keep(self, key: str, header: Header) -> None:
        with self._lock:
            self._headers[key] = header
            self._headers.move_to_end(key)
            if len(self._headers) > MOST_HEADERS:
                self._headers.popitem(last=False)


class BadFiles:
    """Files that cannot be read, or not by this version, by the text of their key. Thread-safe."""

    def __init__(self) -> None:
        self._versions: OrderedDict[str, Version | None] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, key: str) -> bool:
        return key in self._versions

    def is_still(self, key: str, version: Version | None) -> bool:
        """Whether this is the file that was noted."""
        with self._lock:
            if self._versions.get(key, version) != version:
                del self._versions[key]
            return key in self._versions

    def note(self, key: str, version: Version | None) -> None:
        with self._lock:
            self._versions[key] = version
            if len(self._versions) > MOST_HEADERS:
                self._versions.popitem(last=False)
