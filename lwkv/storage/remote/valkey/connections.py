"""Connections to one store, each for one call at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, Protocol, TypeVar


class ServerConnection(Protocol):
    """A connection; one that is not `usable` any more is closed instead of being kept."""

    usable: bool

    def close(self) -> None: ...


C = TypeVar("C", bound=ServerConnection)


class Connections(Generic[C]):
    """Keeps connections that nobody uses now, and makes one where there is none. Thread-safe.

    Args:
        connect: makes one; raises ConnectionError where that fails.
    """

    def __init__(self, connect: Callable[[], C]) -> None:
        self._connect = connect
        self._idle: list[C] = []
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def borrow(self) -> Iterator[C]:
        """Have a connection to oneself. Raises ConnectionError: there is none to be had, or after `close`."""
        with self._lock:
            if self._closed:
                raise ConnectionError("the tier is closed")
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._connect()
        try:
            yield connection
        finally:
            self._give_back(connection)

    def close(self) -> None:
        """Close all of them; one in use is closed when it comes back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            _close(connection)

    def _give_back(self, connection: C) -> None:
        with self._lock:
            kept = connection.usable and not self._closed
            if kept:
                self._idle.append(connection)
        if not kept:
            _close(connection)


def _close(connection: ServerConnection) -> None:
    with suppress(ConnectionError):
        connection.close()
