"""The owner of a node's memory under load: look-ups of long prompts while many clients store.

Run it with `python -m lwkv.benchmarks.shared_host`; it prints JSON. Clients are processes that do not touch a
page, and the owner is one, too: what is measured are messages and the index. No device is used.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

from lwkv.benchmarks.measuring.idle_owner import timed_pin
from lwkv.keys import ChunkKey
from lwkv.shared_host.client.connecting import connect, wait_for_owner
from lwkv.shared_host.client.session import Session
from lwkv.shared_host.client.status import read_status
from lwkv.shared_host.greeting import Hello
from lwkv.shared_host.memfd import make_memory
from lwkv.shared_host.owner.address import Address
from lwkv.shared_host.owner.server import Memory, Server

STRIDE = 4096
PROMPT_CHUNKS = 128
"""32,768 tokens in chunks of 256."""

LONG_S = 60.0


@dataclass(frozen=True)
class Scale:
    """How much there is: chunks with a page a layer, clients that store, and seconds of measuring."""

    chunks: int
    layers: int
    clients: int
    seconds: float
    stores_per_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument(
        "--stores-per-s", type=float, default=1.0, help="prompts that each client stores in a second"
    )
    args = parser.parse_args(arguments)
    scale = Scale(args.chunks, args.layers, args.clients, args.seconds, args.stores_per_s)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(f"{folder}/host.sock", scale), indent=2))
    return 0


def measure(path: str, scale: Scale) -> dict[str, Any]:
    """Fill an owner, look prompts up and pin some without others, and look up while all clients store."""
    context = multiprocessing.get_context("fork")
    owner = _started(context.Process(target=_own, args=(path, scale.chunks * scale.layers)))
    try:
        session = wait_for_owner(path, Hello(STRIDE), LONG_S, lambda: None, LONG_S)
        empty_bytes = _resident_bytes(owner)
        num_prompts = scale.chunks // PROMPT_CHUNKS
        for number in range(num_prompts):
            _store(session, number, scale.layers)
        session.has(0, ())
        index_bytes = _resident_bytes(owner) - empty_bytes
        alone = _lookups(session, num_prompts, scale.seconds)
        asleep = _pins(session, num_prompts, scale.seconds / 2)
        announced = _pins(session, num_prompts, scale.seconds / 2, announces=True)
        stop = context.Event()
        clients = [
            _started(context.Process(target=_store_on, args=(path, number, scale, stop)))
            for number in range(scale.clients)
        ]
        beside = _lookups(session, num_prompts, scale.seconds)
        stop.set()
        for client in clients:
            client.join()
        status = read_status(path)
        session.connection.close()
        session.connection.release()
    finally:
        owner.kill()
        owner.join()
    return {
        "chunks": num_prompts * PROMPT_CHUNKS,
        "pages": scale.chunks * scale.layers,
        "clients": scale.clients,
        "prompts_stored_per_s": (status["chunks_evicted"] / PROMPT_CHUNKS) / scale.seconds,
        "index_bytes_per_chunk": index_bytes / (num_prompts * PROMPT_CHUNKS),
        "lookup_ms": {"alone": _summary(alone), "while_others_store": _summary(beside)},
        "pin_ms": {"asleep": _summary(asleep), "announced": _summary(announced)},
        "cores": os.cpu_count(),
    }


def _started(process: BaseProcess) -> BaseProcess:
    process.start()
    return process


def _own(path: str, num_pages: int) -> None:
    num_bytes = num_pages * STRIDE
    # None of it is filled: nobody touches a page.
    Server(Address(path), Memory(make_memory(num_bytes), num_bytes)).serve()


def _keys(number: int) -> list[ChunkKey]:
    """A prompt's chunks."""
    return [
        ChunkKey("benchmark", number.to_bytes(8, "little") + chunk.to_bytes(8, "little"))
        for chunk in range(PROMPT_CHUNKS)
    ]


def _store(session: Session, number: int, layers: int) -> None:
    """As an engine stores a prompt, but for its bytes."""
    keys = _keys(number)
    pages, _ = session.reserve(session.welcome.num_pages, PROMPT_CHUNKS * layers)
    if pages is not None:
        # Each layer's pages are neighbours.
        rows = pages.reshape(layers, PROMPT_CHUNKS).T.ravel()
        session.commit(keys, [None, *keys[:-1]], [layers] * PROMPT_CHUNKS, rows, {})
        session.free(pages, np.ones(len(pages), np.int64))


def _store_on(path: str, client: int, scale: Scale, stop: Event) -> None:
    session = connect(path, Hello(STRIDE), LONG_S, lambda: None, LONG_S)
    number = (client + 1) << 32
    while not stop.wait(1 / scale.stores_per_s):
        number += 1
        _store(session, number, scale.layers)
        session.has(0, ())
    session.bye()
    session.has(0, ())


def _lookups(session: Session, num_prompts: int, seconds: float) -> list[float]:
    """Milliseconds of each look-up of a whole prompt, for some seconds, with pauses as between requests."""
    random, times = np.random.default_rng(1), []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        keys = _keys(int(random.integers(num_prompts)))
        begun = time.perf_counter()
        session.has(session.welcome.num_pages, keys)
        times.append(1000 * (time.perf_counter() - begun))
        time.sleep(0.002)
    return times


def _pins(session: Session, num_prompts: int, seconds: float, announces: bool = False) -> list[float]:
    """Milliseconds of each pin of a quarter of a prompt, for some seconds, by an owner that has been idle.

    Args:
        announces: whether each is announced before, as a load does.
    """
    random, times = np.random.default_rng(2), []
    announce = session.announce if announces else None
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        keys = _keys(int(random.integers(num_prompts)))[: PROMPT_CHUNKS // 4]
        took_ms, pinned = timed_pin(partial(session.pin, session.welcome.num_pages, keys), announce)
        times.append(took_ms)
        if pinned is not None:
            session.free(pinned.pages, np.ones(len(pinned.pages), np.int64))
            session.has(0, ())
    return times


def _summary(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "count": len(ordered),
        "median": statistics.median(ordered),
        "p90": ordered[int(0.9 * len(ordered))],
        "p99": ordered[int(0.99 * len(ordered))],
    }


def _resident_bytes(process: BaseProcess) -> int:
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
