"""A cluster of real Valkey servers, of which one is killed or frozen: the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from storage.remote_place import ALL, LAYERS, LONG_S, Place
from storage.rig import key
from storage.servers import Server, join_cluster, redis_cluster, running, tell, valkey_program, wait_until

from lwkv.config.settings import Config
from lwkv.errors import ConfigError
from lwkv.storage import Status
from lwkv.storage.remote.valkey.tier import ValkeyTier, examine

NUMBERS = range(30)


@dataclass
class Cluster(Place):
    """A tier on several servers."""

    servers: list[Server] = field(default_factory=list)

    def server_of(self, number: int) -> str:
        assert isinstance(self.tier, ValkeyTier)
        return self.tier._shards.server_of(key(number).to_string())

    def numbers_on(self, *servers: Server) -> list[int]:
        names = [f"127.0.0.1:{server.port}" for server in servers]
        return [number for number in NUMBERS if self.server_of(number) in names]

    def serves(self, number: int) -> bool:
        return self.put(number) == ALL and self.there(number) == [True]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    cluster = redis_cluster(valkey_program(), tmp_path_factory.mktemp("cluster"), 3)
    with running(*cluster):
        join_cluster(cluster)
        yield cluster


@pytest.fixture
def timeout_s() -> float:
    """Longer than a server of a busy machine takes."""
    return 2.0


@pytest.fixture
def cluster(servers: list[Server], timeout_s: float) -> Iterator[Cluster]:
    for server in servers:
        tell(server, "FLUSHALL")
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    opened = Cluster(f"valkey://{hosts}?timeout_s={timeout_s}", servers=servers)
    opened.store(*NUMBERS)
    yield opened
    opened.tier.close()


def test_every_shard_has_some_of_the_chunks_and_all_of_each(cluster: Cluster) -> None:
    parts = [cluster.numbers_on(server) for server in cluster.servers]
    assert all(parts)
    assert sum(map(len, parts)) == len(NUMBERS)
    for server, part in zip(cluster.servers, parts, strict=True):
        assert tell(server, "DBSIZE") == b":%d\r\n" % len(part)
    assert cluster.there(*NUMBERS, 99) == [True] * len(NUMBERS) + [False]
    assert cluster.load(*NUMBERS) == [ALL] * len(NUMBERS)


@pytest.mark.parametrize(("harm", "heal"), [(Server.kill, Server.start), (Server.freeze, Server.thaw)])
def test_a_shard_that_fails_takes_its_own_chunks_away_and_no_others(
    cluster: Cluster, harm: Callable[[Server], None], heal: Callable[[Server], None]
) -> None:
    broken, *whole = cluster.servers
    lost, kept = cluster.numbers_on(broken), cluster.numbers_on(*whole)
    harm(broken)
    try:
        for _ in range(2):
            assert cluster.load(*kept) == [ALL] * len(kept)
            assert cluster.load(lost[0]) == [[Status.ERROR] * LAYERS]
        there = dict(zip(NUMBERS, cluster.there(*NUMBERS), strict=True))
        assert there == dict.fromkeys(lost, False) | dict.fromkeys(kept, True)
        assert cluster.put(lost[0]) == [Status.ERROR] * LAYERS
        assert cluster.put(kept[0]) == ALL
    finally:
        heal(broken)
    wait_until(lambda: cluster.serves(lost[0]), "the shard to serve again", LONG_S)
    assert cluster.load(lost[0], *kept) == [ALL] * (1 + len(kept))


@pytest.mark.parametrize("timeout_s", [0.5])
def test_a_cluster_that_is_gone_as_a_whole_is_an_error_of_the_tier(cluster: Cluster) -> None:
    for server in cluster.servers:
        server.freeze()
    try:
        with pytest.raises(ConnectionError):
            cluster.load(*NUMBERS)
    finally:
        for server in cluster.servers:
            server.thaw()
    wait_until(lambda: all(map(cluster.serves, NUMBERS)), "the cluster to serve again", LONG_S)


def test_a_user_who_may_not_see_the_cluster_is_refused_at_the_start(servers: list[Server]) -> None:
    for server in servers:
        tell(server, "ACL", "SETUSER", "guest", "on", ">guess", "~*", "+@all", "-cluster|slots")
    with pytest.raises(ConfigError, match="does not allow the user") as refused:
        Place(f"valkey://guest:guess@127.0.0.1:{servers[0].port}?cluster=true")
    assert "guess" not in str(refused.value)


def test_the_doctor_is_told_which_shards_there_are(cluster: Cluster) -> None:
    port = cluster.servers[0].port
    found = examine(f"valkey://127.0.0.1:{port}?cluster=true", Config())
    assert found["shards"] == ", ".join(sorted(f"127.0.0.1:{server.port}" for server in cluster.servers))
