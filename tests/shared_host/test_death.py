"""Clients and owners that die or stop: what they held, what others see, and that no byte is wrong."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
from shared_host.owners import LONG_S, owner_at, session_at
from shared_host.workers import (
    LAYERS,
    LENGTH,
    PAGE_BYTES,
    PROMPTS,
    SHORT_S,
    Progress,
    check,
    die_at_message,
    die_at_reply,
    freeze,
    kill,
    load_promised,
    promise_to,
    prompt,
    put,
    run_owner,
    serve_requests,
    start,
    status,
    thaw,
    wait_for,
    wrong_pages,
)
from storage.rig import keys

from lwkv.platforms.cpu import CPU
from lwkv.shared_host.client.opening import open_node_memory
from lwkv.shared_host.client.pool import NodePool
from lwkv.shared_host.client.tier import NodeTier
from lwkv.telemetry.counters import Counters

PAGES = LAYERS * LENGTH * (PROMPTS - 2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "host.sock"


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    number: int = request.config.getoption("--kills")
    return number


def opened(path: Path, timeout_s: float = LONG_S) -> tuple[NodePool, NodeTier]:
    return open_node_memory(str(path), CPU(), PAGE_BYTES, timeout_s, Counters())


def is_at_rest(path: Path) -> bool:
    """Whether nobody holds a page, and all that is in use is of whole chunks."""
    now = status(path)
    return not now["pages_held"] and now["pages_in_use"] == now["chunks"] * LAYERS


def test_a_client_killed_within_any_message_leaves_whole_chunks_and_no_holds(path: Path, kills: int) -> None:
    chosen = random.Random(7)
    with owner_at(path, PAGES):
        for seed in range(kills):
            process = start(die_at_message, path, seed, chosen.randint(1, 60))
            process.join(60)
            assert process.exitcode == -9
            wait_for(lambda: is_at_rest(path))
        pool, tier = opened(path)
        assert any(len(check(pool, tier, prompt(number))) < LENGTH for number in range(PROMPTS))
        pool.close()
        wait_for(lambda: is_at_rest(path))


def test_clients_that_are_killed_at_any_time_spoil_nothing_for_the_others(path: Path, kills: int) -> None:
    chosen = random.Random(8)
    with owner_at(path, PAGES):
        others = [start(serve_requests, path, seed, 40 * kills, LONG_S) for seed in range(2)]
        for seed in range(kills):
            victim = start(serve_requests, path, 100 + seed, 1_000_000, LONG_S)
            victim.join(chosen.uniform(0.01, 0.2))
            kill(victim)
        for process in others:
            process.join(120)
            assert process.exitcode == 0
        wait_for(lambda: is_at_rest(path))


def test_schedulers_and_workers_that_are_killed_at_any_time_spoil_nothing_that_was_given(
    path: Path, kills: int
) -> None:
    chosen = random.Random(12)
    with owner_at(path, PAGES):
        others = [start(serve_requests, path, seed, 1_000_000, LONG_S) for seed in range(2)]
        for seed in range(kills):
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            worker = start(load_promised, path, ends[0], seed)
            scheduler = start(promise_to, path, ends[1], seed)
            for end in ends:
                end.close()
            first, second = chosen.choice([(worker, scheduler), (scheduler, worker)])
            first.join(chosen.uniform(0.05, 0.5))
            assert first.is_alive(), "no byte is wrong, and all that was given is there"
            kill(first)
            second.join(chosen.uniform(0, 0.1))
            kill(second)
            assert second.exitcode in (0, -9)
        for process in others:
            assert process.is_alive()
            kill(process)
        wait_for(lambda: is_at_rest(path) and not status(path)["chunks_promised"])


def end_well(progress: Progress, clients: Sequence[BaseProcess], owner: BaseProcess, path: Path) -> None:
    """Let clients go on for a while with an owner that lives, and end: all well, and nothing is held."""
    progress.wait_more(100)
    progress.stop()
    for process in clients:
        process.join(60)
        assert process.exitcode == 0
    wait_for(lambda: is_at_rest(path))
    kill(owner)


def test_an_owner_that_is_killed_is_followed_by_an_empty_one_and_no_byte_is_wrong(
    path: Path, kills: int
) -> None:
    chosen = random.Random(9)
    owner = start(run_owner, path, PAGES)
    progress = Progress()
    clients = [start(serve_requests, path, seed, -1, SHORT_S, progress.count) for seed in range(2)]
    for _ in range(kills):
        owner.join(chosen.uniform(0.05, 0.5))
        kill(owner)
        owner = start(run_owner, path, PAGES)
    end_well(progress, clients, owner, path)


@pytest.mark.slow  # clients look for a new owner twice a second
def test_an_owner_that_is_killed_within_any_reply_spoils_no_byte_either(path: Path, kills: int) -> None:
    chosen = random.Random(10)
    owner = start(run_owner, path, PAGES)
    progress = Progress()
    clients = [start(serve_requests, path, seed, -1, SHORT_S, progress.count) for seed in range(2)]
    progress.wait_more(10)
    kill(owner)
    for _ in range(kills):
        owner = start(die_at_reply, path, PAGES, chosen.randint(1, 60))
        owner.join(60)
        assert owner.exitcode == -9
    owner = start(run_owner, path, PAGES)
    end_well(progress, clients, owner, path)


def test_an_owner_and_engines_that_stop_and_go_on_again_spoil_no_byte(path: Path, kills: int) -> None:
    """What is answered too late is given back, and nobody waits for longer than a request may take."""
    chosen = random.Random(11)
    owner = start(run_owner, path, PAGES)
    progress = Progress()
    clients = [start(serve_requests, path, seed, -1, SHORT_S, progress.count) for seed in range(2)]
    for _ in range(kills):
        stopped = chosen.choice([owner, *clients])
        progress.wait_more(chosen.randint(1, 20))
        freeze(stopped)
        time.sleep(chosen.uniform(0, 1.5 * SHORT_S))
        thaw(stopped)
    end_well(progress, clients, owner, path)


def test_what_a_client_holds_is_freed_when_its_process_is_gone_and_not_before(path: Path) -> None:
    def hold_and_disconnect() -> None:
        pool, tier = opened(path)
        put(pool, tier, prompt(1), prompt(1))
        assert None not in tier.pin(keys(*prompt(1)))
        assert pool.allocate(2) is not None
        assert pool.session is not None
        pool.session.connection.close()
        os.write(told, b"x")
        os.read(held_up, 1)

    hears, told = os.pipe()
    held_up, go_on = os.pipe()
    with owner_at(path, PAGES):
        process = start(hold_and_disconnect)
        os.read(hears, 1)
        wait_for(lambda: status(path)["clients_leaving"] == 1)
        assert status(path)["pages_held"] == LENGTH * LAYERS + 2
        os.write(go_on, b"x")
        process.join()
        wait_for(lambda: is_at_rest(path))
    for end in (hears, told, held_up, go_on):
        os.close(end)


def test_others_go_on_while_a_client_is_frozen_and_its_pages_stay_its_own(path: Path) -> None:
    def hold() -> None:
        pool, tier = opened(path)
        put(pool, tier, prompt(1), prompt(1))
        assert None not in tier.pin(keys(*prompt(1)))
        os.write(told, b"x")
        serve_requests(path, 3, 1_000_000, LONG_S)

    hears, told = os.pipe()
    with owner_at(path, PAGES):
        process = start(hold)
        os.read(hears, 1)
        freeze(process)
        serve_requests(path, 4, 100, LONG_S)
        pool, tier = opened(path)
        assert tier.contains(keys(*prompt(1))) == [True] * LENGTH
        assert pool.allocate(PAGES) is None
        assert check(pool, tier, prompt(1)) == []
        kill(process)
        pool.close()
        wait_for(lambda: is_at_rest(path))
    os.close(hears)
    os.close(told)


def test_nothing_is_found_while_the_owner_is_frozen_and_all_is_again_when_it_goes_on(path: Path) -> None:
    owner = start(run_owner, path, PAGES)
    pool, tier = opened(path, SHORT_S)
    assert put(pool, tier, prompt(1), prompt(1))
    wait_for(lambda: check(pool, tier, prompt(1)) == [])
    freeze(owner)
    assert tier.contains(keys(*prompt(1))) == [False] * LENGTH
    assert tier.pin(keys(*prompt(1))) == [None] * LENGTH
    assert pool.allocate(2) is None
    assert (pool.available, len(tier) > 0, tier.pins) == (0, True, 0)
    thaw(owner)
    wait_for(lambda: check(pool, tier, prompt(1)) == [])
    pages = pool.allocate(2)
    assert pages is not None
    pool.release(pages)
    pool.close()
    wait_for(lambda: is_at_rest(path))
    kill(owner)


def test_a_reservation_and_a_pin_that_are_answered_too_late_are_given_back(path: Path) -> None:
    owner = start(run_owner, path, PAGES)
    pool, tier = opened(path, SHORT_S)
    put(pool, tier, prompt(1), prompt(1))
    wait_for(lambda: check(pool, tier, prompt(1)) == [])
    for ask in (lambda: pool.allocate(3), lambda: tier.pin(keys(*prompt(1)))[0]):
        wait_for(lambda: tier.contains(keys(prompt(1)[0])) == [True])
        freeze(owner)
        assert ask() is None
        thaw(owner)
        wait_for(lambda: tier.contains(keys(prompt(1)[0])) == [True])
        wait_for(lambda: is_at_rest(path))
    pool.close()
    kill(owner)


def test_pages_in_use_stay_as_they_are_when_the_owner_dies_and_others_have_other_numbers(path: Path) -> None:
    owner = start(run_owner, path, PAGES)
    pool, tier = opened(path)
    put(pool, tier, prompt(1), prompt(1))
    found = tier.pin(keys(*prompt(1)))
    kill(owner)
    owner = start(run_owner, path, PAGES)
    wait_for(lambda: pool.session is None or pool.session.connection.is_lost)
    wait_for(lambda: put(pool, tier, prompt(2), prompt(2)))
    assert check(pool, tier, prompt(2)) == []
    assert tier.contains(keys(*prompt(1))) == [False] * LENGTH
    for number, chunk in zip(prompt(1), found, strict=True):
        assert chunk is not None
        assert wrong_pages(pool, number, chunk) == []
        tier.unpin([chunk])
    assert pool.references == 0
    assert [memory.nbytes for memory in pool.slabs.memory[:1]] == [0], "the old memory is unmapped"
    pool.close()
    wait_for(lambda: is_at_rest(path))
    kill(owner)


def test_a_client_that_sends_garbage_is_disconnected_and_the_owner_serves_the_others(path: Path) -> None:
    random = np.random.default_rng(1)
    with owner_at(path, PAGES):
        pool, tier = opened(path)
        for _ in range(30):
            session = session_at(path)
            garbage = random.integers(0, 256, int(random.integers(1, 300)), np.uint8)
            garbage[:4] = [random.integers(6, 200), 0, 0, 0][: len(garbage)]
            session.connection._socket.send(garbage.tobytes())
            session.connection.close()
            session.connection.release()
        assert put(pool, tier, prompt(1), prompt(1))
        assert check(pool, tier, prompt(1)) == []
        pool.close()


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    from shared_host.workers import forking

    for process in forking.active_children():
        kill(process)
