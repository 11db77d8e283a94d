"""What the clients of remote stores reach with nothing else to do."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any

import torch

from lwkv.errors import ConfigError
from lwkv.keys import HASH_BYTES, ChunkKey, LayerKey
from lwkv.storage import Status, Tier
from lwkv.storage.guard import Transfer
from lwkv.storage.remote.mooncake import client as mooncake_client
from lwkv.storage.remote.valkey.address import read_address
from lwkv.storage.remote.valkey.connecting import connect

NUM_THREADS = 4
LONG_S = 60.0


class PlainRemote:
    """Pages, written and read one by one or as many at a time as a layer has, in a few threads.

    Args:
        pages: one uint8 tensor a page, parts of one slab.
        batch: pages of one call.
        write, read, remove: calls of a client, made on any thread, with the names of pages and the pages.
        close: ends the client.
    """

    def __init__(
        self,
        pages: Sequence[torch.Tensor],
        batch: int,
        write: Callable[[list[str], Sequence[torch.Tensor]], object],
        read: Callable[[list[str], Sequence[torch.Tensor]], object],
        remove: Callable[[list[str]], object],
        close: Callable[[], object],
    ) -> None:
        self._pages, self._batch = pages, batch
        self._write, self._read, self._remove, self._close = write, read, remove, close
        self._rounds = itertools.count(secrets.randbits(32))
        self._round = self._last = -1
        self._threads = ThreadPoolExecutor(NUM_THREADS)

    def write(self) -> None:
        self._last, self._round = self._round, next(self._rounds)
        self._each(self._write)

    def read(self) -> None:
        self._each(self._read)

    def remove_old(self) -> None:
        if self._last >= 0:
            self._remove(self._names(self._last))

    def close(self) -> None:
        """Remove what was written, and end the client."""
        self._remove(self._names(self._round))
        self._threads.shutdown()
        self._close()

    def _each(self, call: Callable[[list[str], Sequence[torch.Tensor]], object]) -> None:
        names, step = self._names(self._round), self._batch
        parts = range(0, len(names), step)
        jobs = [self._threads.submit(call, names[i : i + step], self._pages[i : i + step]) for i in parts]
        for job in jobs:
            job.result()

    def _names(self, number: int) -> list[str]:
        return [f"lwkv.plain.{number}.{i}" for i in range(len(self._pages))]


def open_plain(url: str, slab: torch.Tensor, batch: int) -> PlainRemote:
    """Open a client of the kind that the tier at `url` uses; `slab` is uint8 (pages, page_bytes).

    Raises ConfigError, ConnectionError.
    """
    if url.startswith("mooncake://"):
        return _plain_mooncake(url, slab, batch)
    return _plain_valkey(url, slab)


def tier_alone(tier: Tier, slab: torch.Tensor, batch: int) -> PlainRemote:
    """The same pages moved by a tier, without an engine."""

    def call(move: Transfer) -> Callable[[list[str], Sequence[torch.Tensor]], None]:
        def work(names: list[str], pages: Sequence[torch.Tensor]) -> None:
            statuses = move([_key(name) for name in names], pages, LONG_S)
            if set(statuses) != {Status.OK}:
                raise RuntimeError(f"the tier moved {statuses.count(Status.OK)} of {len(names)} pages")

        return work

    return PlainRemote(list(slab), batch, call(tier.put), call(tier.get), lambda names: None, tier.close)


def _key(name: str) -> LayerKey:
    return LayerKey(ChunkKey("bench", blake2b(name.encode(), digest_size=HASH_BYTES).digest()), 0)


def _plain_valkey(url: str, slab: torch.Tensor) -> PlainRemote:
    address = read_address(url)
    clients = [connect(address)._client for _ in range(NUM_THREADS)]
    idle = list(clients)

    def each(call: Callable[[Any, str, memoryview], object]) -> Callable[..., None]:
        def work(names: list[str], pages: Sequence[torch.Tensor]) -> None:
            client = idle.pop()
            for name, page in zip(names, pages, strict=True):
                call(client, name, page.numpy().data)
            idle.append(client)

        return work

    return PlainRemote(
        list(slab),
        1,
        each(lambda client, name, page: client.set(name, page)),
        each(lambda client, name, page: client.get(name, buffer=page)),
        lambda names: [clients[0].unlink([name]) for name in names],
        lambda: [client.close() for client in clients],
    )


def _plain_mooncake(url: str, slab: torch.Tensor, batch: int) -> PlainRemote:
    store = mooncake_client.connect(mooncake_client.read_address(url))._store
    if store.register_buffer(slab.data_ptr(), slab.nbytes) != 0:
        raise ConfigError(f"{slab.nbytes} bytes cannot be registered with Mooncake")

    def call(name: str) -> Callable[..., Any]:
        function = getattr(store, name)
        return lambda names, pages: function(
            names, [page.data_ptr() for page in pages], [page.nbytes for page in pages]
        )

    return PlainRemote(
        list(slab),
        batch,
        call("batch_put_from"),
        call("batch_get_into"),
        lambda names: store.batch_remove(names, True),
        store.close,
    )
