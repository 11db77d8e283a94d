"""Until when chunks are kept on a server: a prompt's last chunk ends first, whatever order it came in."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lwkv.storage.prefix_order import parents_of

KEPT_MS = 3650 * 24 * 3600 * 1000
"""So long after its last use a chunk ends by itself: ten years, which is never. Only the order matters."""
MOST_CHUNKS = 1 << 16


class ChunkUse(NamedTuple):
    """A chunk's last use: until when it is kept since then, ms since the epoch, and the chunk before it."""

    until_ms: int
    parent: str | None


class UseTimes:
    """When chunks were used, as this process knows it, for the MOST_CHUNKS used last. Thread-safe.

    A chunk ends 1 ms before the one in front of it, so that a server that evicts what ends soonest evicts a
    prompt from its end.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._uses: OrderedDict[str, ChunkUse] = OrderedDict()  # used longest ago first
        self._latest_ms = 0

    def follow(self, prompt: Sequence[str]) -> list[tuple[str, int]]:
        """Note that chunks in a row are used. These, and those known to come before them, last first: until
        when each is kept, ms since the epoch."""
        with self._lock:
            self._latest_ms = max(self._latest_ms, int(self._clock() * 1000))
            row = self._with_before(prompt)
            uses = [
                (name, ChunkUse(self._latest_ms + KEPT_MS - depth, parent))
                for depth, (name, parent) in enumerate(zip(row, parents_of(row), strict=True))
            ]
            for name, use in reversed(uses):
                self._uses[name] = use
                self._uses.move_to_end(name)
            while len(self._uses) > MOST_CHUNKS:
                self._uses.popitem(last=False)
        return [(name, use.until_ms) for name, use in reversed(uses)]

    def until_ms(self, name: str) -> int:
        """Until when a chunk that is written now is kept, ms since the epoch."""
        with self._lock:
            use = self._uses.get(name)
            return int(self._clock() * 1000) + KEPT_MS if use is None else use.until_ms

    def _with_before(self, prompt: Sequence[str]) -> list[str]:
        """Chunks in a row with all that are known to come before them."""
        before: dict[str, None] = {}
        first = self._uses.get(prompt[0])
        name = None if first is None else first.parent
        while name is not None and name not in before:
            before[name] = None
            use = self._uses.get(name)
            name = None if use is None else use.parent
        return [*reversed(before), *prompt]
