"""Models with several groups of caches, and a server below host memory that evicts by itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vllm
from integrations.in_vllm import models
from integrations.in_vllm.hybrid_soak import Prompts
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import CHUNK, Engine, assert_same, prompt, started, with_lwkv
from kinds.kind_strategies import largest_boundary
from storage.servers import Server, any_server_program, redis_server, running, tell

from lwkv.integrations.vllm.hybrid.kind_places import find_places
from lwkv.integrations.vllm.hybrid.refusals import can_have_groups
from lwkv.keys import chunk_keys

pytestmark = pytest.mark.skipif(
    not can_have_groups(vllm.__version__), reason="before 0.32, vLLM has one group beside a connector"
)

NUM_PROMPTS = 60
HOST_GIB = 3 * 2**20 / 2**30
"""96 pages of a chunk in one layer, half of which may be brought for a request: its longest needs 30."""
SERVER_ROOM = "10mb"
"""For a quarter of what the prompts have in all, beside what the server needs itself."""


def write_gemma(folder: Path) -> None:
    models.write_gemma(folder, 64, "wwf" * 2)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    room = ("--maxmemory", SERVER_ROOM, "--maxmemory-policy", "volatile-ttl")
    server = redis_server(any_server_program(), tmp_path / "server", *room)
    with running(server):
        yield server


def below(server: Server, **settings: Any) -> dict[str, Any]:
    url = f"valkey://127.0.0.1:{server.port}"
    return with_lwkv(remote_url=url, load_timeout_s=60, **settings) | {"enable_prefix_caching": True}


def empty(engine: Engine) -> None:
    """Have nothing in vLLM's own cache, nor in host memory."""
    assert engine.flush()
    tier = engine.worker.engine._tier
    assert tier.evict(tier.evictable())
    engine.forget()
    engine.ask([prompt(1, 3)], 1)  # the scheduler hears of it with the next step
    engine.new_hits()


@pytest.mark.parametrize(("write", "hits"), [(write_gemma, 256 + 192), (models.write_lfm2, 288 + 192)])
def test_an_engine_finds_what_one_before_it_has_put_there(
    write: Callable[[Path], None], hits: int, server: Server, tmp_path: Path
) -> None:
    model = models.written(write, tmp_path / "model")
    prompts = [prompt(3600, 300), prompt(3601, 200)]
    with started(model, enable_prefix_caching=False) as plain:
        wanted = plain.ask(prompts)
    with started(model, **below(server)) as engine:
        assert_same(engine.ask(prompts), wanted)
        assert engine.new_hits() == 0
        assert engine.flush()
        engine.groups_at_rest()
    with started(model, **below(server)) as engine:
        for _ in range(2):
            assert_same(engine.ask(prompts), wanted)
            assert engine.new_hits() == hits
            empty(engine)
        tell(server, "FLUSHALL")
        assert_same(engine.ask(prompts), wanted)
        assert engine.new_hits() == 0
        engine.groups_at_rest()


def test_hits_are_what_the_server_and_host_memory_have_left_of_every_kind(
    server: Server, tmp_path: Path
) -> None:
    model = models.written(write_gemma, tmp_path / "model")
    small = {"max_local_cpu_size": HOST_GIB, "extra_config": {"slab_bytes": 1 << 20}}
    computed = Elsewhere(model, enable_prefix_caching=False)
    chance, prompts = random.Random(1), Prompts(36)
    asked = found = wanted_by_host = 0
    try:
        with started(model, max_model_len=704, **below(server, **small)) as engine:
            while asked < NUM_PROMPTS:
                for ids in prompts.next_batch():
                    engine.forget()
                    assert engine.flush()
                    engine.ask([prompt(1, 3)], 1)  # the scheduler hears of what has come and gone
                    wanted, in_host = oracle(engine, ids)
                    (answer,) = answers = engine.ask([ids], chance.choice([4, 20]))
                    assert_same(answers, computed.ask([ids], len(answer.tokens)))
                    assert answer.cached == wanted
                    asked, found, wanted_by_host = asked + 1, found + answer.cached, wanted_by_host + in_host
            engine.groups_at_rest()
            stats = engine.worker.engine.stats()
    finally:
        computed.close()
    evicted = evicted_by(server)
    print(
        f"\n{asked} prompts, {found} tokens found, {wanted_by_host} in host memory; {evicted} evicted there"
    )
    assert found > wanted_by_host > 0
    assert evicted > 0
    assert stats["chunks_evicted"] > 0


def oracle(engine: Engine, ids: Sequence[int]) -> tuple[int, int]:
    """What the rule finds by trying everything in what is kept: in all tiers, and in host memory alone."""
    scheduler = engine.scheduler
    hashes = engine_hashes(engine, ids)
    kinds, index = scheduler._groups.kinds, scheduler._index
    ranks = scheduler._lower._ranks.places(index, hashes)
    places = find_places(kinds, CHUNK, hashes, ranks)
    everywhere = [np.array([tier is not None for tier in own], bool) for own in places.tiers]
    in_host = [np.array([index.is_everywhere(n, h) for h in hashes], bool) for n in range(len(kinds))]
    both = (largest_boundary(kinds, CHUNK, len(ids), 0, flags) for flags in (everywhere, in_host))
    return next(both), next(both)


def engine_hashes(engine: Engine, ids: Sequence[int]) -> list[bytes]:
    return [key.hash for key in chunk_keys(list(ids), CHUNK, engine.scheduler._chain)]


def evicted_by(server: Server) -> int:
    """Keys that the server has evicted."""
    (line,) = (line for line in tell(server, "INFO", "stats").split(b"\r\n") if b"evicted_keys:" in line)
    return int(line.split(b":")[1])
