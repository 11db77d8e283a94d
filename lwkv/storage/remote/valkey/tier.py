"""The remote tier on a Valkey or Redis server, or on a cluster of them.

A chunk is one hash, so that a server evicts it whole, and a cluster has it on one shard: a shard that is down
takes its own chunks away, and no part of the others. Each layer is two fields of it, written and read
together: the page, the bytes that are in the pool, and its seal.
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
from lwkv.storage.remote.valkey.address import read_address
from lwkv.storage.remote.valkey.client import RefusedError, ValkeyClient, WrongTypeError
from lwkv.storage.remote.valkey.connecting import connect
from lwkv.storage.remote.valkey.connections import Connections
from lwkv.storage.remote.valkey.shards import Shard, Shards
from lwkv.storage.remote.valkey.use_times import UseTimes
from lwkv.storage.tier import Status, TierSetup
from lwkv.telemetry.counters import Counters

log = logging.getLogger(__name__)
T = TypeVar("T")
FIELDS_OF_LAYER = 2


def open_tier(url: str, setup: TierSetup) -> ValkeyTier:
    """See TierModule. A server that is not there yet is logged."""
    address = read_address(url)
    tier = ValkeyTier(partial(connect, address), setup.num_layers, setup.counters, layers=setup.layers)
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
        num_layers: of a chunk, which is there where all of them are: it may be evicted while it is written.
        clock: seconds since the epoch.
        layers: of chunks that have another number of them, by the namespace of their keys.
    """

    name = "valkey"

    def __init__(
        self,
        connect: Callable[[], ValkeyClient],
        num_layers: int,
        counters: Counters,
        clock: Callable[[], float] = time.time,
        layers: Mapping[str, int] | None = None,
    ) -> None:
        self._connect = connect
        self._num_layers = num_layers
        self._layers = layers or {}
        self._counters = counters
        self._shards = Shards([Shard(0, "the server")])
        self._clients = Connections(self._new_client)
        self._uses = UseTimes(clock)
        self._sets_ends = True

    def connect(self) -> None:
        """Make the first connection. Raises ConfigError, ConnectionError."""
        with self._clients.borrow():
            pass

    def contains(self, keys: Sequence[ChunkKey], deadline_s: float) -> list[bool]:
        tags = [key.to_string() for key in keys]
        there = [False] * len(keys)
        with self._clients.borrow() as client:
            for server, positions in self._by_server(tags).items():
                # From the last: a server that evicts is to take the end of a prompt before its beginning.
                last_first = positions[::-1]
                names = [_name(tags[i]) for i in last_first]
                counts = self._ask(server, partial(client.count_fields, names)) or [0] * len(names)
                for i, count in zip(last_first, counts, strict=True):
                    num_layers = self._layers.get(keys[i].namespace, self._num_layers)
                    there[i] = count >= num_layers * FIELDS_OF_LAYER
        return there

    def follow(self, prompt: Sequence[ChunkKey], deadline_s: float) -> None:
        uses = self._uses.follow([key.to_string() for key in prompt])
        tags = [tag for tag, _ in uses]
        with self._clients.borrow() as client:
            for server, positions in self._by_server(tags).items():
                names = [_name(tags[i]) for i in positions]
                self._ask(server, partial(self._keep, client, names, [uses[i][1] for i in positions]))

    def get(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        return self._each(self._get, keys, pages, deadline_s)

    def put(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        # What is there already is left: several engines store the same prompts.
        chunks = list({key.chunk: None for key in keys})
        there = dict(zip(chunks, self.contains(chunks, deadline_s), strict=True))
        new = [i for i, key in enumerate(keys) if not there[key.chunk]]
        put = self._each(self._put, [keys[i] for i in new], [pages[i] for i in new], deadline_s)
        statuses = [Status.OK] * len(keys)
        for i, status in zip(new, put, strict=True):
            statuses[i] = status
        return statuses

    def close(self) -> None:
        self._clients.close()

    def _by_server(self, tags: Sequence[str]) -> dict[str, list[int]]:
        """The positions of the tags that each server has, in their order."""
        found: dict[str, list[int]] = {}
        for i, tag in enumerate(tags):
            found.setdefault(self._shards.server_of(tag), []).append(i)
        return found

    def _keep(self, client: ValkeyClient, names: Sequence[str], until_ms: Sequence[int]) -> bool:
        """Have the server evict these in their order; True."""
        if self._sets_ends and not client.keep(names, until_ms):
            self._give_up_ends()
        if not self._sets_ends:
            client.count_fields(names)  # which counts as a use
        return True

    def _give_up_ends(self) -> None:
        self._sets_ends = False
        log.warning(
            "tier valkey: the server refuses PEXPIREAT with NX or GT: with the policy volatile-ttl it cannot "
            "make room; it needs version 7.0 or later, and the user the right +pexpireat"
        )

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
        """Make a call; None if its server is skipped or fails. Raises where no other is left to ask."""
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
        name, fields = _name(key.chunk.to_string()), _fields(key.layer)
        seal = memoryview(bytearray(MOST_SEAL_BYTES))
        try:
            lengths = client.get(name, fields, [page, seal])
        except WrongTypeError:
            client.remove(name)
            return self._miss("valkey_spoiled")
        except RefusedError:
            found = client.lengths(name, fields)
            if found[0] <= len(page) and found[1] <= len(seal):
                raise
            lengths = list(found)
        if None in lengths:
            return self._drop(client, name, "valkey_vanished")
        if lengths[0] != len(page) or seal[: lengths[1]] != seal_of(key, page):
            return self._drop(client, name, "valkey_spoiled")
        return Status.OK

    def _put(self, client: ValkeyClient, key: LayerKey, page: memoryview) -> Status:
        name = _name(key.chunk.to_string())
        page_field, seal_field = _fields(key.layer)
        fields: dict[str, memoryview | bytes] = {page_field: page, seal_field: seal_of(key, page)}
        until_ms = self._uses.until_ms(key.chunk.to_string()) if self._sets_ends else None
        try:
            has_end = client.set(name, fields, until_ms)
        except WrongTypeError:
            client.remove(name)
            has_end = client.set(name, fields, until_ms)
        if not has_end and self._sets_ends:
            self._give_up_ends()
        return Status.OK

    def _drop(self, client: ValkeyClient, name: str, why: str) -> Status:
        """Take layer 0 away, so that the chunk is not promised again."""
        with suppress(RefusedError):
            client.remove_fields(name, _fields(0))
        return self._miss(why)

    def _miss(self, why: str) -> Status:
        self._counters.add(why)
        return Status.MISS

    def _new_client(self) -> ValkeyClient:
        client = self._connect()
        with ExitStack() as undo:
            undo.callback(client.close)
            self._shards.replace(client.shards())
            undo.pop_all()
        return client


def _name(chunk: str) -> str:
    """The key of a chunk. The number is that of the format: what others have put in another is not found."""
    return f"lwkv:2:{{{chunk}}}"


def _fields(layer: int) -> tuple[str, str]:
    """The fields of a layer's page and of its seal."""
    return f"{layer}", f"{layer}:seal"
