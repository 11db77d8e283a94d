"""Processes that store and load in a node's memory, and check every byte; some of them die on the way."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from shared_host.owners import LONG_S, OwnerThread, session_at
from storage.rig import key, keys

from lwkv.platforms.cpu import CPU
from lwkv.shared_host.client.connection import Connection
from lwkv.shared_host.client.opening import open_node_memory
from lwkv.shared_host.client.pool import NodePool
from lwkv.shared_host.client.promises import OwnerPromises
from lwkv.shared_host.client.tier import NodeTier
from lwkv.shared_host.owner.peer import Peer
from lwkv.shared_host.protocol import Op, pack
from lwkv.storage import Chunk
from lwkv.telemetry.counters import Counters

PAGE_BYTES = 64
LAYERS = 3
PROMPTS, LENGTH = 6, 4
SHORT_S = 0.2

forking = multiprocessing.get_context("fork")


def start(work: Callable[..., object], *arguments: Any) -> BaseProcess:
    """Run `work` in a process of its own, which ends with it and leaves nothing behind."""

    def run() -> None:
        work(*arguments)
        os._exit(0)

    process = forking.Process(target=run)
    process.start()
    return process


def run_owner(path: Path, num_pages: int) -> None:
    owner = OwnerThread(path, num_pages * 4096)
    threading.Event().wait()
    owner.end()


def die_at_reply(path: Path, num_pages: int, number: int) -> None:
    """As `run_owner`, and die within the reply of this number: half of it is sent."""
    import lwkv.shared_host.owner.server as server

    sent = 0

    class Dying(Peer):
        def send(self, op: Op, number_of: int, *parts: bytes) -> None:
            nonlocal sent
            sent += 1
            if sent == number:
                frame = pack(op, number_of, parts)
                self.socket.send(bytes(self._waiting) + frame[: len(frame) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            super().send(op, number_of, *parts)

    server.Peer = Dying  # type: ignore[misc]
    run_owner(path, num_pages)


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join()


def freeze(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def thaw(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGCONT)


def prompt(number: int) -> list[int]:
    return list(range(100 * number, 100 * number + LENGTH))


def value(number: int, layer: int) -> int:
    return (number * LAYERS + layer) % 251 + 1


def wrong_pages(pool: NodePool, number: int, chunk: Chunk) -> list[int]:
    """Layers of a chunk whose pages do not hold what they must."""
    pages = [pool.page(page).numpy() for page in chunk.pages.tolist()]
    return [layer for layer, page in enumerate(pages) if (page != value(number, layer)).any()]


def check(pool: NodePool, tier: NodeTier, numbers: Sequence[int]) -> list[int]:
    """Pin what is there of a prompt and compare all of it, twice; the chunks that are missing."""
    found = tier.pin(keys(*numbers))
    there = [(number, chunk) for number, chunk in zip(numbers, found, strict=True) if chunk is not None]
    for _ in range(2):
        for number, chunk in there:
            assert wrong_pages(pool, number, chunk) == [], f"chunk {number} has wrong bytes"
        time.sleep(0.0005)
    tier.unpin([chunk for _, chunk in there])
    return [number for number, chunk in zip(numbers, found, strict=True) if chunk is None]


def put(pool: NodePool, tier: NodeTier, numbers: Sequence[int], missing: Sequence[int]) -> bool:
    """Store chunks of a prompt, if there is room."""
    pages = pool.allocate(LAYERS * len(missing))
    if pages is None:
        return False
    for number, row in zip(missing, pages.reshape(-1, LAYERS), strict=True):
        for layer, page in enumerate(row.tolist()):
            pool.page(page).fill_(value(number, layer))
    parents = [None if n == numbers[0] else key(n - 1) for n in missing]
    tier.insert(keys(*missing), [Chunk(row) for row in pages.reshape(-1, LAYERS)], parents)
    return True


class Progress:
    """Rounds that processes have done together, until they are stopped."""

    def __init__(self) -> None:
        self._rounds = forking.Value("q", 0)
        self._stop = forking.Event()

    def count(self) -> bool:
        """Count a round; whether to go on."""
        with self._rounds.get_lock():
            self._rounds.value += 1
        return not self._stop.is_set()

    def wait_more(self, rounds: int) -> None:
        """Wait for so many rounds from now on."""
        end = self._rounds.value + rounds
        wait_for(lambda: self._rounds.value >= end)

    def stop(self) -> None:
        self._stop.set()


def serve_requests(
    path: Path,
    seed: int,
    rounds: int,
    timeout_s: float = SHORT_S,
    goes_on: Callable[[], bool] = lambda: True,
) -> None:
    """Store and load prompts at random, as an engine would; raises for a wrong byte.

    Rounds in which nothing is found or stored do not count: there may be no owner for a while.
    """
    pool, tier = open_node_memory(str(path), CPU(), PAGE_BYTES, timeout_s, Counters())
    random = np.random.default_rng(seed)
    while rounds:
        numbers = prompt(int(random.integers(PROMPTS)))
        missing = check(pool, tier, numbers)
        if len(missing) < LENGTH or put(pool, tier, numbers, missing):
            rounds = rounds - 1 if goes_on() else 0
        else:
            time.sleep(0.001)
        if len(missing) in range(1, LENGTH):
            put(pool, tier, numbers, missing)
    pool.close()


def load_promised(path: Path, line: socket.socket, others: int) -> None:
    """Say under which name chunks can be promised, then load what comes, until nobody is at the other end.

    Raises for a wrong byte, and for what cannot be taken over.
    """
    pool, tier = open_node_memory(str(path), CPU(), PAGE_BYTES, LONG_S, Counters())
    random = np.random.default_rng(others)
    line.send(tier.name.encode())
    while data := line.recv(1 << 16):
        numbers = prompt(int(random.integers(PROMPTS)))
        if missing := check(pool, tier, numbers):
            put(pool, tier, numbers, missing)
        number, promised = pickle.loads(data)
        chunks = tier.take_over(promised)
        assert chunks is not None
        for _ in range(2):
            for name, chunk in zip(prompt(number), chunks, strict=True):
                assert chunk is None or wrong_pages(pool, name, chunk) == []
            time.sleep(0.0005)
        tier.unpin([chunk for chunk in chunks if chunk is not None])


def promise_to(path: Path, line: socket.socket, seed: int) -> None:
    """Look prompts up, one after the other, for whoever is at the other end, and give most of them.

    Ends where nobody is there any more.
    """
    owner, random = OwnerPromises(str(path), LONG_S), np.random.default_rng(seed)
    name = line.recv(100).decode()
    while True:
        number = int(random.integers(PROMPTS))
        promise = owner.promise(0, [(name, keys(*prompt(number)))])
        assert promise is not None
        (promised,) = promise.promised
        if random.random() < 0.3 or promised is None:
            owner.give(promise, 0, 0)
        elif owner.give(promise, 0, LENGTH):
            try:
                line.send(pickle.dumps((number, promised)))
            except ConnectionError:
                return


def die_at_message(path: Path, seed: int, number: int) -> None:
    """As `serve_requests`, and die within the message of this number: half of it is sent."""
    sent = 0

    class Dying(Connection):
        def _send(self) -> None:
            nonlocal sent
            while self._outbox:
                message = self._outbox.popleft()
                sent += 1
                if sent == number:
                    self._socket.send(self._unsent + message[: len(message) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                self._unsent += message
            super()._send()

    import lwkv.shared_host.client.connecting as connecting

    connecting.Connection = Dying  # type: ignore[misc]
    serve_requests(path, seed, 1_000_000)


def status(path: Path) -> dict[str, int]:
    """What the owner says of itself."""
    import json

    session = session_at(path, 0)
    answer = session.status()
    session.connection.close()
    session.connection.release()
    assert answer is not None
    numbers: dict[str, int] = json.loads(answer)
    return numbers


def wait_for(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something holds; fails after a time that no machine takes."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
