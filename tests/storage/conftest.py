from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from storage.faulty_tier import FaultyTier
from storage.rig import Rig
from storage.servers import (
    Server,
    mooncake_master,
    mooncake_node,
    mooncake_program,
    redis_program,
    redis_server,
    running,
    tell,
)

from lwkv.storage.mooncake_client import connect, read_address


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
    server = redis_server(redis_program(), tmp_path_factory.mktemp("redis"))
    with running(server):
        yield server


@pytest.fixture
def redis(redis_for_all: Server) -> Server:
    """An empty Redis server, the same one for all tests: none of them harms it."""
    tell(redis_for_all, "FLUSHALL")
    return redis_for_all


@pytest.fixture(scope="session")
def mooncake_for_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Any]]:
    program, folder = mooncake_program(), tmp_path_factory.mktemp("mooncake")
    master = mooncake_master(program, folder / "master")
    with running(master, *(mooncake_node(master, folder / name) for name in ("one", "two"))):
        store = connect(read_address(f"mooncake://127.0.0.1:{master.port}"))
        yield master, store._store
        store.close()


@pytest.fixture
def mooncake(mooncake_for_all: tuple[Server, Any]) -> Server:
    """The master of an empty store with two nodes, the same ones for all tests: none of them harms it."""
    master, store = mooncake_for_all
    assert store.remove_all(True) >= 0
    return master
