"""The remote tier on a Mooncake Store: a page and its seal are one object, moved to and from the pool itself.

The objects of a chunk are a group, which the store evicts as a whole.

What is set here and in client.py is for version 0.3.13.post1. It knows no encryption and no users.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from lwkv.config.settings import Config
from lwkv.keys import ChunkKey, LayerKey
from lwkv.platforms.host_limits import read_lock_limit
from lwkv.storage.remote.mooncake.client import (
    NO_MASTER,
    NOT_FOUND,
    NOT_READY,
    REASONS,
    TRANSFER_FAILED,
    WRONG_BYTES,
    WRONG_SIZE,
    MooncakeAddress,
    MooncakeStore,
    connect,
    import_mooncake,
    probe,
    read_address,
)
from lwkv.storage.remote.seal import MOST_SEAL_BYTES, seal_of
from lwkv.storage.tier import WARNING, Status, TierSetup
from lwkv.telemetry.counters import Counters

log = logging.getLogger(__name__)
MOST_REREADS = 40
REREAD_S = 0.005
"""How long a page is waited for that another process has begun to put: 40 times 5 ms."""

MOST_CALLS = 16
"""With so many calls, or fewer, the chunks of a prompt are leased, its end first. The master knows no order
within a call."""
MOST_UNWRITTEN = 256

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
    if warning := lock_limit_warning(address, setup.config, read_lock_limit()):
        log.warning("tier mooncake: %s", warning)
    return MooncakeTier(partial(connect, address), setup.counters)


def examine(url: str, config: Config) -> Mapping[str, str]:
    """See TierModule."""
    address = read_address(url)
    import_mooncake(address.url)
    begin = time.perf_counter()
    own = probe(address)
    took_ms = 1000 * (time.perf_counter() - begin)
    warning = lock_limit_warning(address, config, read_lock_limit())
    return {
        "server": str(address.url),
        "state": f"the master takes connections, within {took_ms:.0f} ms",
        "own address": address.local or own,
        "protocol": f"{address.protocol}, neither encrypted nor with a password: for trusted networks only",
    } | ({WARNING: warning} if warning else {})


def lock_limit_warning(address: MooncakeAddress, config: Config, most_locked: int | None) -> str | None:
    """Say what to do where RDMA cannot register host memory; None where it can.

    Drivers of network cards count what they lock against RLIMIT_MEMLOCK.

    Args:
        most_locked: bytes that the process may lock, None for as much as it likes.
    """
    needed = config.max_host_bytes + address.segment_bytes
    if address.protocol != "rdma" or most_locked is None or needed <= most_locked:
        return None
    return (
        f"remote_url {address.url} has protocol=rdma, which locks max_local_cpu_size and segment_gib, "
        f"{needed / 2**30:.2f} GiB together, but this process may lock {most_locked / 2**30:.2f} GiB: raise "
        "the limit (ulimit -l unlimited, docker run --ulimit memlock=-1), or give it CAP_IPC_LOCK"
    )


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
        # Prompts that are being written, by their last chunk; those followed last, at the end.
        self._unwritten: OrderedDict[ChunkKey, Sequence[ChunkKey]] = OrderedDict()
        self._unwritten_lock = threading.Lock()
        self._closed = False

    def contains(self, keys: Sequence[ChunkKey], deadline_s: float) -> list[bool]:
        if not keys:
            return []
        codes = self._client(deadline_s).exist([_name(LayerKey(key, 0)) for key in keys])
        _require_master(codes)
        return [code == 1 for code in codes]

    def follow(self, prompt: Sequence[ChunkKey], deadline_s: float) -> None:
        with self._unwritten_lock:
            self._unwritten[prompt[-1]] = prompt
            self._unwritten.move_to_end(prompt[-1])
            if len(self._unwritten) > MOST_UNWRITTEN:
                self._unwritten.popitem(last=False)
        self._lease(prompt, deadline_s)

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
        self._lease_written(keys, deadline_s)
        return [self._status(code) for code in codes]

    def close(self) -> None:
        with self._connecting:
            self._closed = True
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def _lease_written(self, keys: Sequence[LayerKey], deadline_s: float) -> None:
        """Lease prompts of which the last chunk was written: the master takes what came first for oldest."""
        for key in keys:
            with self._unwritten_lock:
                prompt = self._unwritten.pop(key.chunk, ()) if key.layer == 0 else ()
            if prompt:
                self._lease(prompt, deadline_s)

    def _lease(self, prompt: Sequence[ChunkKey], deadline_s: float) -> None:
        """Have the master evict the chunks of a prompt last, and its beginning after its end."""
        size = -(-len(prompt) // MOST_CALLS)
        client = self._client(deadline_s)
        for end in range(len(prompt), 0, -size):
            part = prompt[max(0, end - size) : end]
            _require_master(client.exist([_name(LayerKey(key, 0)) for key in part]))

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
