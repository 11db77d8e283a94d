"""Engines on one owner of host memory, with both halves: what a look-up finds is there when it is loaded."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integrations.vllm.scripted import CHUNK, LAYERS, OWNER_S, Scripted, ScriptedRequest, expected
from integrations.vllm.test_scripted import KINDS, History
from oracle import held_completions
from shared_host.owners import OwnerThread, owner_at
from shared_host.workers import wait_for

from lwkv.integrations.vllm.orders import NULL_BLOCK, Move, StepOrders, packed
from lwkv.integrations.vllm.reports import RankReport
from lwkv.integrations.vllm.scheduler.lookup.promises import KEPT_S
from lwkv.shared_host.client.promises import OwnerPromises

ROOM = 12
"""Chunks that the owner has room for, of one rank."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "host.sock"


@pytest.fixture
def owner(path: Path) -> Iterator[OwnerThread]:
    with owner_at(path, ROOM * LAYERS) as owner:
        yield owner


def engine_at(path: Path, seed: int = 0, **settings: Any) -> Scripted:
    extra = {"host_memory_timeout_s": OWNER_S}
    return Scripted(seed, host_memory=str(path), extra_config=extra, **settings)


def require_rest(owner: OwnerThread) -> None:
    wait_for(lambda: owner.server.status()["pages_held"] == 0)
    status = owner.server.status()
    assert status["chunks_promised"] == 0
    assert status["pages_in_use"] == status["chunks"] * LAYERS


def answer_of(engine: Scripted, name: str, tokens: list[int]) -> list[int]:
    """The answer to a prompt, which is right."""
    engine.add(ScriptedRequest(name, tokens, 1))
    engine.run()
    assert engine.answers[name] == [expected(tokens, engine.num_ranks)]
    return engine.answers[name]


NODE_KINDS = [
    "one rank",
    "whole graphs",
    "few blocks",
    "small steps",
    "rests too",
    "two ranks, few blocks, no prefix cache",
    "asynchronous, decoded tokens too",
    "asynchronous, decoded tokens too, two ranks",
]


@pytest.mark.parametrize(("seed", "kind"), list(enumerate(NODE_KINDS)))
def test_no_load_of_two_engines_fails_though_each_evicts_what_the_other_finds(
    kind: str, seed: int, path: Path
) -> None:
    """Devices do not fail here, and hooks come: all that could fail is a load of what has gone."""
    settings = KINDS[kind]
    ranks = int(settings.get("num_ranks", 1))
    with owner_at(path, ROOM * LAYERS * ranks) as owner:
        histories = [WithoutFailures(engine_at(path, 2 * seed + i, **settings)) for i in range(2)]
        histories[1].prefixes = histories[0].prefixes
        order = random.Random(seed)
        for _ in range(250):
            history = order.choice(histories)
            history.happen()
            history.engine.step()
        for history in histories:
            history.engine.run()
            history.check()
            history.engine.at_rest()
            assert history.engine.failed == 0
        assert sum(history.engine.loaded for history in histories) > 0
        require_rest(owner)
        for history in histories:
            history.engine.close()


class WithoutFailures(History):
    """Requests come, end early and share; all of an engine's own cache goes now and then."""

    def happen(self) -> None:
        draw, engine = self.random, self.engine
        chance = draw.random()
        if chance < 0.35:
            self.add()
        elif chance < 0.42 and self.requests:
            engine.abort(draw.choice(self.requests))
        elif chance < 0.425:
            engine.scheduler.reset()
        elif chance < 0.55:
            engine.blocks.known.clear()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_load_of_what_was_promised_sends_no_request_and_announces_none(
    path: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with owner_at(path, 40 * LAYERS * num_ranks) as owner:
        one, other = (engine_at(path, seed, num_ranks=num_ranks, own_cache=False) for seed in range(2))
        tokens = list(range(5 * CHUNK + 3))
        answer_of(one, "stored", tokens)
        one.at_rest()
        calls: list[str] = []
        for rank in other.ranks:
            host = rank.engine.parts().storage.host
            for name in ("announce", "pin", "use"):
                real = getattr(host, name)
                monkeypatch.setattr(
                    host, name, lambda *a, r=real, n=name: (calls.append(n) if a != ([],) else None, r(*a))[1]
                )
        other.add(ScriptedRequest("loaded", tokens, 1))
        other.step()
        assert other.loaded == 5 * CHUNK
        # A store pins what is known of its prompt while it writes the rest.
        assert "announce" not in calls
        assert calls.count("pin") <= num_ranks
        assert "use" not in calls
        other.run()
        assert other.answers["loaded"] == [expected(tokens, num_ranks)]
        for engine in (one, other):
            engine.at_rest()
            engine.close()
        require_rest(owner)


def engine_without_blocks(path: Path, num_more: int = 0) -> tuple[Scripted, ScriptedRequest]:
    """An engine with a request that lacks blocks, of two cached chunks and `num_more` that are not."""
    engine = engine_at(path, num_blocks=10, own_cache=False, budget=64)
    tokens = list(range(2 * CHUNK + 3))
    answer_of(engine, "stored", tokens)
    engine.at_rest()
    engine.add(ScriptedRequest("runs", [900 + i for i in range(30)], 4))
    engine.step()
    waits = ScriptedRequest("waits", list(range((2 + num_more) * CHUNK + 3)), 1)
    engine.add(waits)
    engine.step()
    assert waits in engine.waiting
    return engine, waits


@contextmanager
def counting(engine: Scripted) -> Iterator[list[int]]:
    """From which chunk on the scheduler has something promised inside, each time."""
    promises, asked = engine.scheduler._promises, list[int]()
    assert promises is not None
    owner = promises._owner
    real = owner.promise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, "promise", lambda first, takers: (asked.append(first), real(first, takers))[1])
        yield asked


@pytest.mark.parametrize(("room", "kept"), [(100, 2), (ROOM, 0)])
def test_what_is_little_stays_promised_to_a_request_that_waits_for_blocks_and_ends_with_it(
    path: Path, room: int, kept: int
) -> None:
    with owner_at(path, room * LAYERS) as owner:
        engine, waits = engine_without_blocks(path)
        wait_for(lambda: owner.server.status()["chunks_promised"] == kept)
        with counting(engine) as asked:
            engine.step()
        assert waits in engine.waiting
        assert asked == ([] if kept else [0]), "what is promised is not asked for again"
        engine.abort(waits)
        wait_for(lambda: owner.server.status()["chunks_promised"] == 0)
        engine.run()
        engine.at_rest()
        require_rest(owner)
        engine.close()


def test_a_promise_is_made_anew_after_a_second_and_used_when_there_are_blocks(path: Path) -> None:
    with owner_at(path, 100 * LAYERS) as owner:
        engine, waits = engine_without_blocks(path)
        now = engine.scheduler.index.clock()
        engine.scheduler.index.clock = lambda: now + KEPT_S
        with counting(engine) as asked:
            engine.step()
        assert waits in engine.waiting
        assert asked == [0]
        engine.run()
        assert engine.loaded == 2 * CHUNK
        assert engine.answers["waits"] == [expected(list(range(2 * CHUNK + 3)), 1)]
        engine.at_rest()
        require_rest(owner)
        engine.close()


def test_what_comes_to_the_memory_while_a_request_waits_for_blocks_is_promised_to_it_too(path: Path) -> None:
    with owner_at(path, 100 * LAYERS) as owner:
        engine, waits = engine_without_blocks(path, num_more=1)
        other = engine_at(path, 1, own_cache=False)
        answer_of(other, "stored", waits.prompt_token_ids)
        other.at_rest()
        assert owner.server.status()["chunks_promised"] == 2
        rank = engine.ranks[0]
        third = rank.engine.keys(waits.prompt_token_ids)[2].hash
        engine.scheduler.index.learn(RankReport(rank.worker.info, 0, kept=[third]))
        with counting(engine) as asked:
            engine.step()
            engine.step()
        assert waits in engine.waiting
        assert asked == [0]
        engine.run()
        assert (engine.loaded, engine.failed) == (3 * CHUNK, 0)
        for one in (engine, other):
            one.at_rest()
            one.close()
        require_rest(owner)


def test_what_an_owner_has_promised_that_is_gone_is_not_loaded(path: Path) -> None:
    with owner_at(path, 100 * LAYERS):
        engine, waits = engine_without_blocks(path)
        promises = engine.scheduler._promises
        assert promises is not None
        assert isinstance(promises._owner, OwnerPromises)
        now = engine.scheduler.index.clock()
        engine.scheduler.index.clock = lambda: now  # what is promised stays, but for its owner
        before, clients = promises._owner.session, (promises._owner, engine.ranks[0].engine._pool)
    with owner_at(path, 100 * LAYERS) as owner:
        wait_for(lambda: all(client.session not in (None, before) for client in clients))
        wait_for(lambda: owner.server.status()["clients"] == 1)
        with counting(engine) as asked:
            engine.step()
        assert waits in engine.waiting
        assert asked == [0]
        engine.run()
        assert (engine.loaded, engine.failed) == (0, 0)
        engine.at_rest()
        require_rest(owner)
        engine.close()


def test_a_reset_ends_what_is_promised(path: Path) -> None:
    with owner_at(path, 100 * LAYERS) as owner:
        engine, _ = engine_without_blocks(path)
        assert owner.server.status()["chunks_promised"] == 2
        engine.scheduler.reset()
        wait_for(lambda: owner.server.status()["chunks_promised"] == 0)
        engine.run()
        engine.at_rest()
        require_rest(owner)
        engine.close()


def test_a_request_waits_for_chunks_that_are_on_their_way_and_then_loads_them(path: Path) -> None:
    with owner_at(path, 60 * LAYERS) as owner:
        engine = engine_at(path, own_cache=False, num_blocks=80, budget=200)
        tokens = list(range(4 * CHUNK + 3))
        with held_completions(engine.ranks[0].engine):
            engine.add(ScriptedRequest("stores", tokens, 1))
            engine.step()
            engine.add(ScriptedRequest("follows", [*tokens, 7], 1))
            engine.step()
            assert engine.waits > 0
            assert owner.server.status()["chunks"] == 0
        engine.run()
        assert engine.loaded == 4 * CHUNK
        assert engine.answers["follows"] == [expected([*tokens, 7], 1)]
        engine.at_rest()
        require_rest(owner)
        engine.close()


def test_orders_with_what_was_promised_go_to_workers_in_other_processes(
    path: Path, owner: OwnerThread
) -> None:
    engine = engine_at(path, own_cache=False)
    tokens = list(range(3 * CHUNK + 3))
    answer_of(engine, "stored", tokens)
    engine.at_rest()
    begin = engine.ranks[0].worker.begin
    seen: list[int] = []

    def by_wire(orders: Any) -> None:
        sent = pickle.loads(pickle.dumps(orders))
        seen.extend(len(own.pinned.pages) for move in sent.loads for own in move.promised if own is not None)
        if not seen or not orders.loads:
            begin(orders)
        elif len(seen) == 1:
            begin(sent)

    engine.ranks[0].worker.begin = by_wire  # type: ignore[method-assign]
    answer_of(engine, "loaded", tokens)
    assert seen[0] == 3 * LAYERS
    engine.at_rest()
    require_rest(owner)
    engine.close()


def test_what_is_promised_of_chunks_behind_a_window_is_given_back_at_once(
    path: Path, owner: OwnerThread
) -> None:
    """No token of the first chunk has a block: it is held, and not loaded."""
    engine = engine_at(path, own_cache=False)
    (rank,) = engine.ranks
    tokens = list(range(3 * CHUNK))
    answer_of(engine, "stored", [*tokens, 7])
    engine.at_rest()
    keys = rank.engine.keys(tokens)
    scheduler = OwnerPromises(str(path), OWNER_S)
    promise = scheduler.promise(0, [(rank.worker.info.host_name, keys)])
    assert promise is not None
    assert scheduler.give(promise, 0, 3)
    ids, blocks = np.array(tokens), np.array([NULL_BLOCK, NULL_BLOCK, 1, 2, 3, 4])
    load = Move(ids, (), blocks, 0, len(tokens), [packed(keys)], promise.promised)
    rank.worker.begin(StepOrders(1000, 0, loads=[load]))
    assert rank.engine.stats()["pins"] == 2
    rank.worker.start_load(False)
    rank.worker.end()
    assert rank.worker.invalid_blocks() == set()
    engine.at_rest()
    require_rest(owner)
    scheduler.close()
    engine.close()
