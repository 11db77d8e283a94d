"""Pages of lower tiers on their way to host memory, while their requests wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from lwkv.background.exit import waitable
from lwkv.background.workers import Workers
from lwkv.integrations.sglang.page_keys import page_keys
from lwkv.storage import StorageManager
from lwkv.storage.prefetch import ReadGroup

NUM_THREADS = 2
MOST_WAITING = 16
"""Requests whose pages are on their way at a time; others ask again with their next lookup."""


class BringUp:
    """Brings chunks to host memory, where SGLang's next lookup finds them. For the scheduler's thread.

    Nothing here waits: tiers are asked on threads of this object.

    Args:
        timeout_s: seconds that the chunks of one request may take; what has arrived by then is kept.
    """

    def __init__(self, storage: StorageManager, timeout_s: float) -> None:
        self._storage = storage
        self._timeout_s = timeout_s
        self._workers = Workers("bring-up", NUM_THREADS)
        self._under_way: set[tuple[str, str]] = set()

    def ask(self, namespace: str, hashes: Sequence[str], first: int) -> bool:
        """Have the leading ones of these pages from `first` on brought that a lower tier has.

        False, to be asked again, where too much is on its way, or the first of them is.

        Args:
            namespace, hashes: as those of `page_keys`, of all pages that a request lacks on the device; those
                before `first` are in host memory.
        """
        if not self._storage.lower.guards:
            return True
        wanted = namespace, hashes[first]
        if len(self._under_way) >= MOST_WAITING or wanted in self._under_way:
            return False
        self._under_way.add(wanted)
        brought = self._workers.submit(partial(self._bring, namespace, hashes, first))
        brought.add_done_callback(lambda _: self._under_way.discard(wanted))
        return True

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until nothing is on its way; False if that takes over `timeout_s` seconds."""
        return self._workers.wait_idle(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Bring nothing more; False if what is on its way takes over `timeout_s` seconds."""
        self._workers.cancel_queued()
        return self._workers.close(timeout_s)

    def _bring(self, namespace: str, hashes: Sequence[str], first: int) -> None:
        deadline, ended = time.monotonic() + self._timeout_s, threading.Event()
        hold = self._storage.hold(page_keys(namespace, hashes), first)
        with ExitStack() as ending:
            # What is complete becomes part of host memory then; the rest goes back.
            ending.callback(hold.release)
            group = ReadGroup(hold, lambda _: ended.set())
            group.ask(self._storage)
            ended.wait(waitable(deadline - time.monotonic()))
            group.cancel()
