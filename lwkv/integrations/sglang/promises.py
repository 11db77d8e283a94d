"""What lookups have promised: pages pinned in host memory until they are loaded."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lwkv.integrations.sglang.chains import Chains
from lwkv.integrations.sglang.page_keys import page_keys
from lwkv.keys import ChunkKey
from lwkv.storage.host_tier import Chunk, HostChunks

PROMISE_S = 30.0
"""Seconds a promise is kept that nobody asks for again: SGLang does not report requests that it drops."""


@dataclass(slots=True, eq=False)
class Promise:
    """The pages that one request was promised: the first of those it asked for.

    Attributes:
        asked: SGLang's hashes of all pages it asked for.
        keys, chunks: of those promised, pinned.
        until: when it ends, by the clock.
        asked_below: whether lower tiers were asked for the rest.
    """

    asked: Sequence[str]
    keys: list[ChunkKey] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    until: float = 0.0
    asked_below: bool = False

    def answers(self, hashes: Sequence[str]) -> bool:
        """Whether `hashes` ask for the very same pages: the last one covers all before it."""
        return len(self.asked) == len(hashes) and self.asked[-1] == hashes[-1]


class Promises:
    """Pins by request. For the scheduler's thread, which never waits here.

    SGLang looks a request up again and again while it waits, and once more right before it loads. It does not
    report that a request is gone. So promises end by time, and the oldest ones where they pin too much.

    Args:
        host: host memory, the only tier that is asked.
        most_chunks: that may be pinned for requests other than the last one.

    Attributes:
        by_request: those that were made and not taken, by the request's name.
        chains: the order of the pages that were asked for.
    """

    def __init__(
        self, host: HostChunks, most_chunks: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._host = host
        self._most_chunks = most_chunks
        self._clock = clock
        self.by_request: OrderedDict[str, Promise] = OrderedDict()
        self._pinned = 0
        self.chains = Chains()

    def __len__(self) -> int:
        return len(self.by_request)

    def promise(self, rid: str, namespace: str, hashes: Sequence[str]) -> Promise:
        """Pin the longest prefix of `hashes` that is in host memory for request `rid`, from now on.

        What the request was promised before is kept if it asks for the same pages, else given up.
        """
        promise = self.by_request.pop(rid, None)
        if promise is not None and not promise.answers(hashes):
            self._unpin(promise)
            promise = None
        if promise is None:
            promise = Promise(hashes)
            self.chains.note(hashes)
        self._extend(promise, namespace)
        promise.until = self._clock() + PROMISE_S
        self.by_request[rid] = promise
        self._end_oldest(promise)
        return promise

    def take(self, rid: str, hashes: Sequence[str]) -> Promise | None:
        """Take over what a request was promised, for `unpin`; None where that was not all of `hashes`."""
        promise = self.by_request.pop(rid, None)
        if promise is None:
            return None
        self._pinned -= len(promise.chunks)
        length = len(hashes)
        # The last one covers all before it.
        if len(promise.keys) < length or promise.asked[length - 1] != hashes[-1]:
            length = 0
        self._host.unpin(promise.chunks[length:])
        del promise.keys[length:], promise.chunks[length:]
        return promise if length else None

    def unpin(self, promise: Promise) -> None:
        """End a promise that was taken over."""
        self._host.unpin(promise.chunks)

    def expire(self) -> None:
        """End what nobody has asked for again in time."""
        while self.by_request and next(iter(self.by_request.values())).until <= self._clock():
            self._end_first()

    def clear(self) -> None:
        while self.by_request:
            self._end_first()

    def _extend(self, promise: Promise, namespace: str) -> None:
        """Pin what more of the prefix is there by now."""
        start = len(promise.keys)
        # Most often there is nothing new, which one key shows.
        if not any(self._host.contains(page_keys(namespace, promise.asked[start : start + 1]))):
            return
        keys = page_keys(namespace, promise.asked[start:])
        pinned = self._host.pin_prefix(keys)
        promise.keys += keys[: len(pinned)]
        promise.chunks += pinned
        self._pinned += len(pinned)

    def _end_oldest(self, last: Promise) -> None:
        while self._pinned - len(last.chunks) > self._most_chunks:
            self._end_first()

    def _end_first(self) -> None:
        _, promise = self.by_request.popitem(last=False)
        self._unpin(promise)

    def _unpin(self, promise: Promise) -> None:
        self._pinned -= len(promise.chunks)
        self._host.unpin(promise.chunks)
