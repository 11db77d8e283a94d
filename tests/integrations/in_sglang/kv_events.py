"""What SGLang publishes of the pages on its device, as a router reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import zmq

SILENCE_MS = 1000
"""How long nothing comes before all is there that is going to."""


@dataclass(frozen=True)
class Stored:
    """A page that is on the device: its hash, that of the page before it, and its tokens."""

    hash: int
    parent: int | None
    tokens: tuple[int, ...]


@dataclass
class Events:
    """What happened, in order.

    Attributes:
        stored: pages that came.
        removed: hashes of pages that went.
        cleared: how often all of them went.
        media: where pages are said to be.
    """

    stored: list[Stored] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    cleared: int = 0
    media: set[str] = field(default_factory=set)

    def note(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        assert kind in ("BlockStored", "BlockRemoved", "AllBlocksCleared"), event
        self.cleared += kind == "AllBlocksCleared"
        if kind == "BlockStored":
            parent, pages = event["parent_block_hash"], pages_of(event["token_ids"], event["block_size"])
            for page, tokens in zip(event["block_hashes"], pages, strict=True):
                self.stored.append(Stored(page, parent, tokens))
                parent = page
            self.media.add(event["medium"])
        if kind == "BlockRemoved":
            self.removed += event["block_hashes"]
            self.media.add(event["medium"])


class Router:
    """Listens to one engine from before it starts; a context manager.

    Attributes:
        config: what SGLang takes as `kv_events_config`.
    """

    def __init__(self, folder: Path) -> None:
        endpoint = f"ipc://{folder / 'events'}"
        self.config = json.dumps({"publisher": "zmq", "endpoint": endpoint, "topic": "kv"})
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe("kv")
        self._socket.connect(endpoint)
        self._next: int | None = None  # what was published before a router listens is not for it

    def __enter__(self) -> Router:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close(0)
        self._context.term()

    def hear(self, least: int = 0, patience_ms: int = 60_000) -> Events:
        """All that was published since the last call: at least so many pages that were stored, in time."""
        events = Events()
        while self._socket.poll(patience_ms if len(events.stored) < least else SILENCE_MS):
            _, number, payload = self._socket.recv_multipart()
            got = int.from_bytes(number, "big")
            assert self._next in (None, got), "a batch of events was lost"
            self._next = got + 1
            for event in msgspec.msgpack.decode(payload)[1]:
                events.note(event)
        return events


def pages_of(prompt: Sequence[int], page: int) -> list[tuple[int, ...]]:
    """The tokens of its whole pages."""
    return [tuple(prompt[end - page : end]) for end in range(page, len(prompt) + 1, page)]
