"""The remote tier on a Valkey or Redis server, or on a cluster of them.

Each layer of a chunk is two values, written and read together: the page, the bytes that are in the pool, and
its seal. All keys of a chunk have the chunk as their hash tag, so that a cluster keeps a chunk on one shard:
a shard that is down takes its own chunks away, and no part of the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TypeVar

import torch

from lwkv.config.settings import Config
from lwkv.keys import ChunkKey, LayerKey
from lwkv.storage.remote.seal import MOST_SEAL_BYTES, seal_of
from lwkv.storage.remote.valkey.client import RefusedError, ValkeyClient, connect, read_address
from lwkv.storage.remote.valkey.connections import Connections
from lwkv.storage.remote.valkey.shards import Shard, Shards
from lwkv.storage.tier import Status, TierSetup
from lwkv.telemetry.counters import Counters

log = logging.getLogger(__name__)
T = TypeVar("T")


def open_tier(url: str, setup: TierSetup) -> ValkeyTier:
    """See TierModule. A server that is not there yet is told of in the log."""
    address = read_address(url)
    tier = ValkeyTier(partial(connect, address), setup.num_layers, setup.counters)
    try:
        tier.connect()
    except ConnectionError as error:
        log.warning("tier valkey: %s; every chunk is a miss there until it answers", error)
    except RefusedError as error:
        raise address.url.refuse(f"{error}") from None
    return tier


def examine(url: str, config: Config) -> Mapping[str, str]:
    """See TierModule."""
    address = read_address(url)
    begin = time.perf_counter()
    client = connect(address)
    try:
        servers = {shard.server for shard in client.shards()} if address.cluster else set()
        took_ms = 1000 * (time.perf_counter() - begin)
        parts = {"shards": ", ".join(sorted(servers))} if servers else {}
        return {"server": str(address.url), "state": f"answers, connected in {took_ms:.0f} ms", **parts}
    finally:
        client.close()


class ValkeyTier:
    """See Tier. What is not what was put is a miss, counted as "valkey_spoiled" or "valkey_vanished".

    Args:
        connect: makes a connection. Raises ConfigError, ConnectionError.
        num_layers: of a chunk, which is there where all of them are: servers evict values, not chunks.
    """

    name = "valkey"

    def __init__(self, connect: Callable[[], ValkeyClient], num_layers: int, counters: Counters) -> None:
        self._connect = connect
        self._num_layers = num_layers
        self._counters = counters
        self._shards = Shards([Shard(0, "the server")])
        self._clients = Connections(self._new_client)

    def connect(self) -> None:
        """Make the first connection. Raises ConfigError, ConnectionError."""
        with self._clients.borrow():
            pass

    def contains(self, keys: Sequence[ChunkKey], deadline_s: float) -> list[bool]:
        tags = [key.to_string() for key in keys]
        by_server: dict[str, list[int]] = {}
        for i, tag in enumerate(tags):
            by_server.setdefault(self._shards.server_of(tag), []).append(i)
        there = [False] * len(keys)
        with self._clients.borrow() as client:
            for server, positions in by_server.items():
                groups = [[_page_name(tags[i], n) for n in range(self._num_layers)] for i in positions]
                counts = self._ask(server, partial(client.touch, groups)) or [0] * len(groups)
                for i, count in zip(positions, counts, strict=True):
                    there[i] = count == self._num_layers
        return there

    def get(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        return self._each(self._get, keys, pages, deadline_s)

    def put(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        return self._each(self._put, keys, pages, deadline_s)

    def close(self) -> None:
        self._clients.close()

    def _each(
        self,
        call: Callable[[ValkeyClient, LayerKey, memoryview], Status],
        keys: Sequence[LayerKey],
        pages: Sequence[torch.Tensor],
        deadline_s: float,
    ) -> list[Status]:
        end = time.monotonic() + deadline_s
        statuses = [Status.ERROR] * len(keys)
        with self._clients.borrow() as client:
            for i, (key, page) in enumerate(zip(keys, pages, strict=True)):
                if time.monotonic() >= end:
                    break
                server = self._shards.server_of(key.chunk.to_string())
                asked = partial(call, client, key, page.numpy().data)
                statuses[i] = self._ask(server, asked) or Status.ERROR
        return statuses

    def _ask(self, server: str, call: Callable[[], T]) -> T | None:
        """Make a call; None where its server rests or fails, and raises where no other is left to ask."""
        if self._shards.is_resting(server):
            return None
        try:
            answer = call()
        except ConnectionError as error:
            if self._shards.failed(server, error):
                raise
            return None
        self._shards.answered(server)
        return answer

    def _get(self, client: ValkeyClient, key: LayerKey, page: memoryview) -> Status:
        names, seal = _names(key), memoryview(bytearray(MOST_SEAL_BYTES))
        try:
            lengths = client.get(names, [page, seal])
        except RefusedError:
            found = client.lengths(names)
            if found[0] <= len(page) and found[1] <= len(seal):
                raise
            lengths = list(found)
        if None in lengths:
            return self._drop(client, key, "valkey_vanished")
        if lengths[0] != len(page) or seal[: lengths[1]] != seal_of(key, page):
            return self._drop(client, key, "valkey_spoiled")
        return Status.OK

    def _put(self, client: ValkeyClient, key: LayerKey, page: memoryview) -> Status:
        client.set(dict(zip(_names(key), (page, seal_of(key, page)), strict=True)))
        return Status.OK

    def _drop(self, client: ValkeyClient, key: LayerKey, why: str) -> Status:
        """Take layer 0 away, so that the chunk is not promised again."""
        with suppress(RefusedError):
            client.remove(_names(LayerKey(key.chunk, 0)))
        self._counters.add(why)
        return Status.MISS

    def _new_client(self) -> ValkeyClient:
        client = self._connect()
        with ExitStack() as undo:
            undo.callback(client.close)
            self._shards.replace(client.shards())
            undo.pop_all()
        return client


def _names(key: LayerKey) -> tuple[str, str]:
    """The keys of a page and of its seal."""
    name = _page_name(key.chunk.to_string(), key.layer)
    return name, f"{name}:seal"


def _page_name(tag: str, layer: int) -> str:
    return f"lwkv:{{{tag}}}:{layer}"
