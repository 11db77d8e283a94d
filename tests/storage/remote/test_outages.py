"""Engines go on right while the servers of their remote tier are killed, frozen and started again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from oracle import Dims, Oracle, run_slots
from storage.servers import (
    Server,
    any_server_program,
    mooncake_master,
    mooncake_node,
    mooncake_program,
    redis_server,
    running,
    wait_until,
)

from lwkv.background.workers import Workers
from lwkv.engine import CacheEngine
from lwkv.errors import ClosedError
from lwkv.platforms import Platform

CHUNK, LAYERS = 8, 3
LENGTH = 2 * CHUNK
FROM, INTO = run_slots(0, LENGTH), run_slots(64, LENGTH)
LONG_S = 60.0


class Store(NamedTuple):
    """Servers that make up a remote tier, and the one of them that the test harms."""

    url: str
    victim: Server


def start_redis(folder: Path, stack: ExitStack) -> Store:
    server = redis_server(any_server_program(), folder)
    stack.enter_context(running(server))
    return Store(f"redis://127.0.0.1:{server.port}?timeout_s=0.5&connect_timeout_s=0.5", server)


def start_mooncake(victim: int, folder: Path, stack: ExitStack) -> Store:
    master = mooncake_master(mooncake_program(), folder / "master")
    nodes = [mooncake_node(master, folder / name) for name in ("one", "two")]
    stack.enter_context(running(master, *nodes))
    return Store(f"mooncake://127.0.0.1:{master.port}", [master, *nodes][victim])


STORES = {
    "redis": start_redis,
    "mooncake's master": partial(start_mooncake, 0),
    "a node of mooncake": partial(start_mooncake, 1),
}


@dataclass
class OutageSetup:
    """An engine that keeps nothing in host memory, over a store; every load is checked to the byte."""

    oracle: Oracle
    engine: CacheEngine
    prompts: int = 0

    def store(self, flush_s: float = LONG_S) -> list[int]:
        """Compute and store another prompt, and wait for that."""
        self.prompts += 1
        tokens = [1000 * self.prompts + i for i in range(LENGTH)]
        self.oracle.compute(tokens, FROM)
        self.engine.store(tokens, slot_mapping=FROM)
        self.engine.flush(flush_s)
        return tokens

    def kept(self) -> list[int]:
        """Another prompt that the tier has: on a busy machine it may be late, and be skipped for a while."""
        tokens = self.store()
        end = time.monotonic() + LONG_S
        while self.load(tokens) < LENGTH:
            assert time.monotonic() < end, "waited in vain for the tier to serve"
            tokens = self.store()
        return tokens

    def load(self, tokens: list[int], meanwhile: Callable[[], object] = lambda: None) -> int:
        """Load a prompt layer by layer, with something happening after the first; the tokens that came."""
        steps = self.engine.retrieve_layer(tokens, slot_mapping=INTO)
        next(steps)
        next(steps)
        meanwhile()
        *_, mask = steps
        assert isinstance(mask, torch.Tensor)
        self.oracle.forget(INTO, ~mask.numpy())
        self.oracle.expect(tokens, INTO, mask)
        self.oracle.check()
        return int(mask.sum())

    def serves(self) -> bool:
        """Whether another prompt is stored and loaded again."""
        return self.load(self.store()) == LENGTH


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with ExitStack() as stack:
        yield STORES[request.param](tmp_path, stack)


@pytest.fixture
def setup(store: Store, platform: Platform, device: torch.device) -> Iterator[OutageSetup]:
    oracle = Oracle(platform, device, dims=Dims(blocks=32))
    engine = oracle.engine(
        CHUNK, remote_url=store.url, local_cpu=False, load_timeout_s=2.0, prefetch_layers=0
    )
    yield OutageSetup(oracle, engine)
    engine.close(LONG_S)
    assert engine.stats()["page_references"] == 0


@pytest.mark.parametrize(("harm", "heal"), [(Server.kill, Server.start), (Server.freeze, Server.thaw)])
def test_a_server_that_fails_in_the_middle_of_a_load_costs_only_what_it_had(
    store: Store, setup: OutageSetup, harm: Callable[[Server], None], heal: Callable[[Server], None]
) -> None:
    def go_through_it() -> None:
        known = [setup.kept() for _ in range(3)]
        setup.load(known[0], meanwhile=partial(harm, store.victim))
        for tokens in known:
            setup.load(tokens)
        setup.store(flush_s=0)
        heal(store.victim)
        wait_until(setup.serves, "the tier to serve again", LONG_S)
        for tokens in known:
            setup.load(tokens)

    # On a thread of its own, so that a call that hangs fails this test and does not end all.
    Workers("test", 1).submit(go_through_it).result(2 * LONG_S)


def test_closing_does_not_wait_for_a_server_that_hangs(store: Store, setup: OutageSetup) -> None:
    known = setup.kept()
    store.victim.freeze()
    try:
        setup.store(flush_s=0)
        closed = Workers("test", 1).submit(partial(setup.engine.close, 0.1))
        closed.result(LONG_S)
        with pytest.raises(ClosedError):
            setup.load(known)
    finally:
        store.victim.thaw()
