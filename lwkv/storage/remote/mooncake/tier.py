"""The remote tier on a Mooncake Store: a page and its seal are one object, moved to and from the pool itself.

The objects of a chunk are a group, which the store evicts as a whole.

What is set here and in client.py is for version 0.3.13.post1. It knows no encryption and no users.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from lwkv.config.settings import Config
from lwkv.keys import ChunkKey, LayerKey
from lwkv.storage.remote.mooncake.client import (
    NO_MASTER,
    NOT_FOUND,
    NOT_READY,
    REASONS,
    TRANSFER_FAILED,
    WRONG_BYTES,
    WRONG_SIZE,
    MooncakeStore,
    connect,
    import_mooncake,
    probe,
    read_address,
)
from lwkv.storage.remote.seal import MOST_SEAL_BYTES, seal_of
from lwkv.storage.tier import Status, TierSetup
from lwkv.telemetry.counters import Counters

log = logging.getLogger(__name__)
MOST_REREADS = 40
REREAD_S = 0.005
"""How long a page is waited for that another process has begun to put: 40 times 5 ms."""

_WRONG = (WRONG_BYTES, WRONG_SIZE)

GRACE_S = 10.0
"""How long pages of a call that failed may still be written to: longer than the client's time-outs."""


def open_tier(url: str, setup: TierSetup) -> MooncakeTier:
    """See TierModule. A master that is not there yet is logged."""
    address = read_address(url)
    import_mooncake(address.url)
    try:
        probe(address)
    except ConnectionError as error:
        log.warning("tier mooncake: %s; every chunk is a miss there until it answers", error)
    return MooncakeTier(partial(connect, address), setup.counters)


def examine(url: str, config: Config) -> Mapping[str, str]:
    """See TierModule."""
    address = read_address(url)
    import_mooncake(address.url)
    begin = time.perf_counter()
    own = probe(address)
    took_ms = 1000 * (time.perf_counter() - begin)
    return {
        "server": str(address.url),
        "state": f"the master takes connections, within {took_ms:.0f} ms",
        "own address": address.local or own,
        "protocol": f"{address.protocol}, neither encrypted nor with a password: for trusted networks only",
    }


class MooncakeTier:
    """See Tier. What is not what was put is a miss, counted as "mooncake_spoiled" or "mooncake_vanished".

    The client is set up by the first call. Other failures are counted by their reason, see REASONS.

    Args:
        connect: makes a client. Raises ConfigError, ConnectionError.
    """

    name = "mooncake"
    grace_s = GRACE_S

    def __init__(self, connect: Callable[[], MooncakeStore], counters: Counters) -> None:
        self._connect = connect
        self._counters = counters
        self._store: MooncakeStore | None = None
        self._connecting = threading.Lock()
        self._closed = False

    def contains(self, keys: Sequence[ChunkKey], deadline_s: float) -> list[bool]:
        if not keys:
            return []
        # From the last: a store that evicts is to take the end of a prompt before its beginning.
        codes = self._client(deadline_s).exist([_name(LayerKey(key, 0)) for key in keys[::-1]])
        _require_master(codes)
        return [code == 1 for code in codes[::-1]]

    def get(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        if not keys:
            return []
        client = self._client(deadline_s)
        codes = _read(client, keys, pages)
        for _ in range(MOST_REREADS):
            late = [i for i, code in enumerate(codes) if code == NOT_READY]
            if not late:
                break
            time.sleep(REREAD_S)
            again = _read(client, [keys[i] for i in late], [pages[i] for i in late])
            for i, code in zip(late, again, strict=True):
                codes[i] = code
        self._drop(client, keys, codes)
        return [self._status(code) for code in codes]

    def put(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        if not keys:
            return []
        seals = [_seal(key, page) for key, page in zip(keys, pages, strict=True)]
        names, groups = [_name(key) for key in keys], [key.chunk.to_string() for key in keys]
        codes = self._client(deadline_s).put(names, groups, pages, seals)
        _require_master(codes)
        return [self._status(code) for code in codes]

    def close(self) -> None:
        with self._connecting:
            self._closed = True
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def _client(self, deadline_s: float) -> MooncakeStore:
        if not self._connecting.acquire(timeout=deadline_s):
            raise ConnectionError("the client is still being set up")
        try:
            if self._closed:
                raise ConnectionError("the tier is closed")
            self._store = self._store or self._connect()
            return self._store
        finally:
            self._connecting.release()

    def _drop(self, client: MooncakeStore, keys: Sequence[LayerKey], codes: Sequence[int]) -> None:
        """Remove what is wrong, which would stay for ever, and layer 0 of chunks that lack something."""
        wrong = [key for key, code in zip(keys, codes, strict=True) if code in _WRONG]
        gone = [key for key, code in zip(keys, codes, strict=True) if code == NOT_FOUND]
        names = {_name(LayerKey(key.chunk, 0)) for key in (*wrong, *gone)} | {_name(key) for key in wrong}
        if names:
            client.remove(sorted(names))

    def _status(self, code: int) -> Status:
        if code < 0:
            self._counters.add(f"mooncake_{REASONS.get(code, f'code_{-code}')}")
        if code >= 0:
            return Status.OK
        return Status.MISS if code in (*_WRONG, NOT_FOUND) else Status.ERROR


def _read(client: MooncakeStore, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor]) -> list[int]:
    ends = client.get([_name(key) for key in keys], pages)
    _require_master([code for code, _ in ends])
    return [
        _verified(client, key, page, code, seal)
        for key, page, (code, seal) in zip(keys, pages, ends, strict=True)
    ]


def _verified(client: MooncakeStore, key: LayerKey, page: torch.Tensor, code: int, seal: bytes) -> int:
    num_bytes = page.nbytes + MOST_SEAL_BYTES
    if code >= 0:
        return code if code == num_bytes and seal == _seal(key, page) else WRONG_BYTES
    # An object of another size cannot be distinguished from a node that fails.
    if code == TRANSFER_FAILED and client.size(_name(key)) not in (None, num_bytes):
        return WRONG_SIZE
    return code


def _require_master(codes: Sequence[int]) -> None:
    if NO_MASTER in codes:
        raise ConnectionError("the master does not answer")


def _name(key: LayerKey) -> str:
    return f"lwkv.{key.to_string()}"


def _seal(key: LayerKey, page: torch.Tensor) -> bytes:
    return seal_of(key, page.numpy().data).ljust(MOST_SEAL_BYTES, b"\0")
