"""A cluster of real Valkey servers, of which one is killed or frozen: the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from storage.places import make_setup
from storage.rig import NUM_LAYERS, keys
from storage.servers import Server, join_cluster, redis_cluster, running, tell, valkey_program, wait_until

from lwkv.config import Config
from lwkv.keys import ChunkKey, LayerKey
from lwkv.storage import Status
from lwkv.storage.valkey import ValkeyTier, examine, open_tier

LONG_S = 30.0
PAGE_BYTES = 1000
CHUNKS = keys(*range(30))
ALL = [Status.OK] * NUM_LAYERS


@dataclass
class Cluster:
    """Three servers and a tier on them."""

    servers: list[Server]
    tier: ValkeyTier

    def server_of(self, chunk: ChunkKey) -> str:
        return self.tier._shards.server_of(chunk.to_string())

    def chunks_of(self, *servers: Server) -> list[ChunkKey]:
        names = [f"127.0.0.1:{server.port}" for server in servers]
        return [chunk for chunk in CHUNKS if self.server_of(chunk) in names]

    def put(self, chunk: ChunkKey) -> list[Status]:
        asked = chunk.split_layers(NUM_LAYERS)
        return self.tier.put(asked, [page_of(each) for each in asked], LONG_S)

    def load(self, *chunks: ChunkKey) -> list[list[Status]]:
        return [self._load(chunk) for chunk in chunks]

    def serves(self, chunk: ChunkKey) -> bool:
        return self.put(chunk) == ALL and self.tier.contains([chunk], LONG_S) == [True]

    def _load(self, chunk: ChunkKey) -> list[Status]:
        asked = chunk.split_layers(NUM_LAYERS)
        pages = [torch.zeros(PAGE_BYTES, dtype=torch.uint8) for _ in asked]
        statuses = self.tier.get(asked, pages, LONG_S)
        for each, page, status in zip(asked, pages, statuses, strict=True):
            assert status is not Status.OK or torch.equal(page, page_of(each))
        return statuses


def page_of(asked: LayerKey) -> torch.Tensor:
    return torch.full((PAGE_BYTES,), asked.chunk.hash[0] * NUM_LAYERS + asked.layer, dtype=torch.uint8)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    cluster = redis_cluster(valkey_program(), tmp_path_factory.mktemp("cluster"), 3)
    with running(*cluster):
        join_cluster(cluster)
        yield cluster


@pytest.fixture
def cluster(servers: list[Server]) -> Iterator[Cluster]:
    for server in servers:
        tell(server, "FLUSHALL")
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    tier = open_tier(f"valkey://{hosts}?timeout_s=0.5", make_setup(PAGE_BYTES, NUM_LAYERS))
    opened = Cluster(servers, tier)
    for chunk in CHUNKS:
        assert opened.put(chunk) == ALL
    yield opened
    tier.close()


def test_every_shard_has_some_of_the_chunks_and_all_of_each(cluster: Cluster) -> None:
    parts = [cluster.chunks_of(server) for server in cluster.servers]
    assert all(parts)
    assert sum(map(len, parts)) == len(CHUNKS)
    for server, part in zip(cluster.servers, parts, strict=True):
        assert tell(server, "DBSIZE") == b":%d\r\n" % (len(part) * NUM_LAYERS * 2)
    assert cluster.tier.contains([*CHUNKS, *keys(99)], LONG_S) == [True] * len(CHUNKS) + [False]
    assert cluster.load(*CHUNKS) == [ALL] * len(CHUNKS)


@pytest.mark.parametrize(("harm", "heal"), [(Server.kill, Server.start), (Server.freeze, Server.thaw)])
def test_a_shard_that_fails_takes_its_own_chunks_away_and_no_others(
    cluster: Cluster, harm: Callable[[Server], None], heal: Callable[[Server], None]
) -> None:
    broken, *whole = cluster.servers
    lost, kept = cluster.chunks_of(broken), cluster.chunks_of(*whole)
    harm(broken)
    try:
        for _ in range(2):
            assert set(map(tuple, cluster.load(*kept))) == {tuple(ALL)}
            assert cluster.load(lost[0]) == [[Status.ERROR] * NUM_LAYERS]
        there = dict(zip(CHUNKS, cluster.tier.contains(CHUNKS, LONG_S), strict=True))
        assert there == dict.fromkeys(lost, False) | dict.fromkeys(kept, True)
        assert cluster.put(lost[0]) == [Status.ERROR] * NUM_LAYERS
        assert cluster.put(kept[0]) == ALL
    finally:
        heal(broken)
    wait_until(lambda: cluster.serves(lost[0]), "the shard to serve again", LONG_S)
    assert cluster.load(lost[0], *kept) == [ALL] * (1 + len(kept))


def test_a_cluster_that_is_gone_as_a_whole_is_an_error_of_the_tier(cluster: Cluster) -> None:
    for server in cluster.servers:
        server.freeze()
    try:
        with pytest.raises(ConnectionError):
            cluster.load(*CHUNKS)
    finally:
        for server in cluster.servers:
            server.thaw()
    wait_until(lambda: all(map(cluster.serves, CHUNKS)), "the cluster to serve again", LONG_S)


def test_the_doctor_is_told_which_shards_there_are(cluster: Cluster) -> None:
    port = cluster.servers[0].port
    found = examine(f"valkey://127.0.0.1:{port}?cluster=true", Config())
    assert found["shards"] == ", ".join(sorted(f"127.0.0.1:{server.port}" for server in cluster.servers))
