"""The parts of a remote store that fail one by one, and which of them are skipped for now."""

from __future__ import annotations

import logging
import threading
import time
from binascii import crc_hqx
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

log = logging.getLogger(__name__)

NUM_SLOTS = 16384
FIRST_REST_S = 1.0
DOUBLINGS = 4


class Shard(NamedTuple):
    """Who serves the hash slots from `first_slot` up to the next shard's."""

    first_slot: int
    server: str


def slot_of(tag: str) -> int:
    """Give the hash slot of all keys with `{tag}` in them, as Redis and Valkey clusters work it out."""
    return crc_hqx(tag.encode(), 0) % NUM_SLOTS


class Shards:
    """Which shard has a key, and which are skipped after a failure: for 1 s, then 2, up to 16. Thread-safe.

    A store of one shard is never skipped here: the tier's guard skips the whole tier.
    """

    def __init__(self, shards: Sequence[Shard], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: dict[str, int] = {}
        self._rest_until: dict[str, float] = {}
        self.replace(shards)

    def replace(self, shards: Sequence[Shard]) -> None:
        """Take over who serves what now; a server that is skipped still is."""
        self._shards = sorted(shards)

    def server_of(self, tag: str) -> str:
        """Name the server of all keys with `{tag}` in them."""
        shards = self._shards
        return shards[bisect_right(shards, slot_of(tag), key=lambda shard: shard.first_slot) - 1].server

    def is_resting(self, server: str) -> bool:
        with self._lock:
            return self._clock() < self._rest_until.get(server, 0.0)

    def failed(self, server: str, error: Exception) -> bool:
        """Skip `server` for a while; True if no other one is left to ask."""
        others = {shard.server for shard in self._shards} - {server}
        if not others:
            return True
        with self._lock:
            now = self._clock()
            if now >= self._rest_until.get(server, 0.0):
                count = self._failures[server] = self._failures.get(server, 0) + 1
                rest_s = FIRST_REST_S * 2 ** min(count - 1, DOUBLINGS)
                self._rest_until[server] = now + rest_s
                if count == 1:
                    log.warning("%s does not serve its part of the cluster: %s", server, error)
            return all(now < self._rest_until.get(other, 0.0) for other in others)

    def answered(self, server: str) -> None:
        """End the row of failures of `server`."""
        if server in self._failures:
            with self._lock:
                if self._failures.pop(server, 0):
                    self._rest_until.pop(server, None)
                    log.info("%s serves its part of the cluster again", server)
