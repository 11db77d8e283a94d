"""Looks into a node's memory without having any of it: for whoever decides what engines load."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from lwkv.keys import ChunkKey, LayerKey
from lwkv.shared_host.client.connecting import connect
from lwkv.shared_host.client.session import Session
from lwkv.shared_host.greeting import Hello
from lwkv.storage.tier import HOST, Status

_ALL_PAGES = 1 << 62


class NodeLookup:
    """The host memory of a node as a Tier that is only asked what is there. Thread-safe.

    Connects when it is asked, and again to a new owner when the last one is gone.
    """

    name = HOST

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._session: Session | None = None

    def contains(self, keys: Sequence[ChunkKey], deadline_s: float) -> list[bool]:
        """Raises NoOwnerError, TimeoutError."""
        there = self._require_session().has(_ALL_PAGES, keys)
        if there is None:
            raise TimeoutError(f"the owner of host memory at {self._path} does not answer")
        return there

    def get(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        return [Status.MISS] * len(keys)

    def put(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        return [Status.MISS] * len(keys)

    def close(self) -> None:
        with self._lock:
            if self._session is not None:
                self._session.connection.close()
                self._session.connection.release()

    def _require_session(self) -> Session:
        with self._lock:
            session = self._session
            if session is not None and session.connection.is_resting:
                session.connection.tend()
            if session is None or session.connection.is_lost:
                if session is not None:
                    session.connection.release()
                self._session = None
                session = connect(self._path, Hello(0), self._timeout_s, lambda: None, self._timeout_s)
                self._session = session
            return session
