"""Mooncake Store's own client: how it is set up, the memory it may use, what its answers mean."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lwkv.storage.remote.client_probe import version_of, what_is_missing
from lwkv.storage.remote.remote_url import RemoteURL, parse_remote_url
from lwkv.storage.remote.seal import MOST_SEAL_BYTES

DEFAULT_PORT = 50051
OPTIONS = ("metadata", "protocol", "devices", "local", "segment_gib", "replicas", "connect_timeout_s")
NOT_READY = -703
NOT_FOUND = -704
WRONG_SIZE = -600
TRANSFER_FAILED = -800
NO_MASTER = -900
WRONG_BYTES = -1
"""Not the client's own: what came is not what was put."""
REASONS = {
    WRONG_BYTES: "spoiled",
    WRONG_SIZE: "spoiled",
    NOT_READY: "not_ready",
    NOT_FOUND: "vanished",
    -200: "no_space",
    -707: "lease_expired",
    TRANSFER_FAILED: "transfer_failed",
    NO_MASTER: "no_master",
}
"""What the codes below 0 mean, in the words of counters."""

NUM_SEALS = 1 << 14
# Without the first two a transfer from a node that hangs blocks for a minute, and may write to memory even
# later. The third leaves its errors on the terminal, and no more.
_ENVIRONMENT = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_LOG_LEVEL": "ERROR",
}

_PACKAGE = "mooncake-transfer-engine-non-cuda"
_NEEDED = (
    *(
        f"MooncakeDistributedStore.{call}"
        for call in (
            *("setup", "get_hostname", "close", "register_buffer", "unregister_buffer"),
            *("get_size", "batch_is_exist"),
            *("batch_get_into_multi_buffers", "batch_put_from_multi_buffers", "batch_remove"),
        )
    ),
    *(f"ReplicateConfig.{name}" for name in ("replica_num", "group_ids", "preferred_segment")),
)
"""What is used of the client."""


@dataclass(frozen=True)
class MooncakeAddress:
    """What is needed to take part in a store. `segment_bytes` is what this process lends to it."""

    url: RemoteURL
    metadata: str
    protocol: str
    devices: str
    local: str | None
    segment_bytes: int
    replicas: int
    connect_timeout_s: float

    @property
    def master(self) -> tuple[str, int]:
        return self.url.hosts[0]


def read_address(text: str) -> MooncakeAddress:
    """Read a URL with the scheme mooncake. Raises ConfigError."""
    url = parse_remote_url(text, DEFAULT_PORT, OPTIONS)
    protocol, replicas = url.options.get("protocol", "tcp"), url.options.get("replicas", "1")
    if len(url.hosts) != 1 or url.path:
        raise url.refuse("the master is one host and one port; nothing follows but options")
    if url.password or url.user:
        raise url.refuse("Mooncake knows no users and no passwords: leave them out, and see docs/remote.md")
    if protocol not in ("tcp", "rdma"):
        raise url.refuse(f"protocol is {protocol!r}; allowed: tcp or rdma")
    if not replicas.isdecimal() or int(replicas) < 1:
        raise url.refuse(f"replicas is {replicas!r}; allowed: a whole number of 1 or more")
    return MooncakeAddress(
        url,
        # A node that starts again finds its old entry in the other kinds of metadata and cannot join.
        url.options.get("metadata", "P2PHANDSHAKE"),
        protocol,
        url.options.get("devices", ""),
        url.options.get("local"),
        url.gib("segment_gib", 0.0),
        int(replicas),
        url.seconds("connect_timeout_s", 1.0),
    )


def import_mooncake(url: RemoteURL) -> Any:
    """Import the client, with its time-outs set. Raises ConfigError: it is not there or too old."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import xxhash  # noqa: F401
        from mooncake import store
    except ImportError as error:
        raise url.refuse(
            f"Mooncake's client cannot be loaded ({error}): pip install '.[mooncake]' "
            "in lwkv's folder; it also needs "
            "libibverbs (Debian: apt-get install libibverbs1)"
        ) from None
    if missing := what_is_missing(store, dict.fromkeys(_NEEDED, ())):
        raise url.refuse(
            f"{_PACKAGE} {version_of(_PACKAGE)} is installed, but 0.3.13.post1 is needed: "
            f"it lacks {', '.join(missing)}; pip install '.[mooncake]' in lwkv's folder"
        )
    return store


def probe(address: MooncakeAddress) -> str:
    """Find out whether the master takes connections; the own address on the way there.

    Raises ConnectionError. Setting a client up takes 4 s to find out, and may block for ever.
    """
    try:
        with socket.create_connection(address.master, address.connect_timeout_s) as one:
            return str(one.getsockname()[0])
    except OSError as error:
        raise ConnectionError(f"{address.url} cannot be reached: {error}") from None


def connect(address: MooncakeAddress) -> MooncakeStore:
    """Take part in the store. Raises ConfigError, ConnectionError."""
    mooncake = import_mooncake(address.url)
    own = probe(address)
    store = mooncake.MooncakeDistributedStore()
    host, port = address.master
    # Without a port of its own it would try 20 times where once is enough.
    code = store.setup(
        *(address.local or f"{own}:{_free_port(own)}", address.metadata, address.segment_bytes, 0),
        *(address.protocol, address.devices, f"{host}:{port}"),
    )
    # A client that could not be set up crashes the process when it is asked for something.
    if code != 0:
        raise ConnectionError(f"{address.url}: the client cannot be set up, code {code}")
    own_segment = store.get_hostname() if address.segment_bytes else ""
    return MooncakeStore(store, partial(_plan, mooncake, address.replicas, own_segment))


def _plan(mooncake: Any, replicas: int, own_segment: str, groups: Sequence[str]) -> Any:
    """Where objects go, and to which group each belongs: a group is evicted as a whole."""
    plan = mooncake.ReplicateConfig()
    plan.replica_num, plan.group_ids = replicas, list(groups)
    # In memory of its own, where there is some: no network is in the way, and the death of another node takes
    # no part of the chunk.
    plan.preferred_segment = own_segment
    return plan


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        one.bind((host, 0))
        return int(one.getsockname()[1])


class MooncakeStore:
    """A client that is set up, for several threads at once.

    Each object is a page and its seal. Codes are the client's own: below 0 what went wrong, see REASONS.
    """

    def __init__(self, store: Any, plan: Callable[[Sequence[str]], Any]) -> None:
        self._store = store
        self._plan = plan
        self._lock = threading.Lock()
        self._registered: dict[int, Any] = {}  # by address, a StorageWeakRef
        # Used in turn, and again after a while: a seal that is overwritten late fits no page, and is a miss.
        with torch.inference_mode(False):  # threads of the tier write to them
            self._seals = torch.zeros(NUM_SEALS, MOST_SEAL_BYTES, dtype=torch.uint8)
        self._next_seal = 0

    def get(self, names: Sequence[str], pages: Sequence[torch.Tensor]) -> list[tuple[int, bytes]]:
        """Read objects into pages; the code of each, above 0 where it is there, and the seal that came."""
        seals = self._take_seals(len(names))
        for seal in seals:
            seal.zero_()
        codes = self._store.batch_get_into_multi_buffers(list(names), *self._places(pages, seals))
        return [(code, seal.numpy().tobytes()) for code, seal in zip(codes, seals, strict=True)]

    def put(
        self,
        names: Sequence[str],
        groups: Sequence[str],
        pages: Sequence[torch.Tensor],
        seals: Sequence[bytes],
    ) -> list[int]:
        """Keep objects; those that are there stay as they are. The code of each, 0 where it is there now.

        Objects of one of the `groups` leave the store together.
        """
        places = self._take_seals(len(names))
        for place, seal in zip(places, seals, strict=True):
            place.copy_(torch.frombuffer(bytearray(seal), dtype=torch.uint8))
        addresses, sizes = self._places(pages, places)
        codes: list[int] = self._store.batch_put_from_multi_buffers(
            list(names), addresses, sizes, self._plan(groups)
        )
        return codes

    def exist(self, names: Sequence[str]) -> list[int]:
        """1 for an object that is there, 0 for one that is not; those that are stay for the lease's time."""
        codes: list[int] = self._store.batch_is_exist(list(names))
        return codes

    def size(self, name: str) -> int | None:
        """The bytes of an object; None where that is not known."""
        found = int(self._store.get_size(name))
        return None if found < 0 else found

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, whoever reads them now."""
        self._store.batch_remove(list(names), True)

    def close(self) -> None:
        """Leave; what this process lent goes with it."""
        self._store.close()
        self._registered.clear()

    def _places(
        self, pages: Sequence[torch.Tensor], seals: Sequence[torch.Tensor]
    ) -> tuple[list[list[int]], list[list[int]]]:
        for part in (*pages, *seals):
            self._register(part.untyped_storage())
        pairs = list(zip(pages, seals, strict=True))
        addresses = [[page.data_ptr(), seal.data_ptr()] for page, seal in pairs]
        return addresses, [[page.nbytes, seal.nbytes] for page, seal in pairs]

    def _register(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            known = self._registered.get(storage.data_ptr())
            if known is not None and not known.expired():
                return
            self._forget_unused()
            code = self._store.register_buffer(storage.data_ptr(), storage.nbytes())
            if code != 0:
                raise RuntimeError(f"{storage.nbytes()} bytes cannot be registered, code {code}")
            self._registered[storage.data_ptr()] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def _forget_unused(self) -> None:
        """Unregister memory that nobody has any more, as that of an owner which is gone: it is not kept here,
        and what comes now may have its address."""
        for address in [address for address, known in self._registered.items() if known.expired()]:
            self._store.unregister_buffer(address)
            del self._registered[address]

    def _take_seals(self, count: int) -> list[torch.Tensor]:
        with self._lock:
            first = self._next_seal
            self._next_seal = (first + count) % NUM_SEALS
        return [self._seals[(first + i) % NUM_SEALS] for i in range(count)]
