"""The headers of chunk files that were read or written lately."""

from __future__ import annotations

import threading
from collections import OrderedDict

from lwkv.storage.disk_format import Header

MOST_HEADERS = 4096


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
