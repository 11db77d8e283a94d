from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from storage.faulty_tier import FaultyTier
from storage.rig import Rig
from storage.servers import (
    Server,
    any_server_program,
    mooncake_master,
    mooncake_node,
    mooncake_program,
    redis_server,
    running,
    tell,
)

from lwkv.storage.remote.mooncake.client import MooncakeStore, connect, read_address


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Makes rigs; when the test has ended each must come to rest and give everything back."""
    rigs: list[Rig] = []

    def make(*tiers: FaultyTier, num_chunks: int = 8, **arguments: Any) -> Rig:
        rigs.append(Rig(num_chunks, tiers, **arguments))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.end()


@pytest.fixture
def tier() -> FaultyTier:
    return FaultyTier()


@pytest.fixture
def rig(make_rig: Callable[..., Rig], tier: FaultyTier) -> Rig:
    """Eight chunks of host memory above one tier."""
    return make_rig(tier)


@pytest.fixture(scope="session")
def redis_for_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = redis_server(any_server_program(), tmp_path_factory.mktemp("redis"))
    with running(server):
        yield server


@pytest.fixture
def redis(redis_for_all: Server) -> Server:
    """An empty Redis server, the same one for all tests: none of them harms it."""
    tell(redis_for_all, "FLUSHALL")
    return redis_for_all


@pytest.fixture(scope="session")
def mooncake_master_for_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    program, folder = mooncake_program(), tmp_path_factory.mktemp("mooncake")
    master = mooncake_master(program, folder / "master")
    with running(master, *(mooncake_node(master, folder / name) for name in ("one", "two"))):
        yield master


@pytest.fixture(scope="session")
def mooncake_clients(mooncake_master_for_all: Server) -> Iterator[list[MooncakeStore]]:
    """Two clients for all tests."""
    address = read_address(f"mooncake://127.0.0.1:{mooncake_master_for_all.port}")
    clients = [connect(address) for _ in range(2)]
    yield clients
    for client in clients:
        client.close()


@pytest.fixture
def mooncake(mooncake_master_for_all: Server, mooncake_clients: list[MooncakeStore]) -> Server:
    """The master of an empty store with two nodes, the same ones for all tests: none of them harms it."""
    assert mooncake_clients[0]._store.remove_all(True) >= 0
    return mooncake_master_for_all
