"""Both halves on toy models with a disk below host memory: restarts, little memory, tiers that fail."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hybrid.rig import Toy, full, state, window
from integrations.in_vllm.faulty_disk import FaultyDisk
from integrations.vllm.hybrid import test_worker, test_worker_states
from integrations.vllm.hybrid.test_worker import prompt

from lwkv.integrations.vllm.hybrid.groups import CacheGroups
from lwkv.integrations.vllm.hybrid.lower_hits import LowerHits
from lwkv.integrations.vllm.hybrid.rank_tiers import open_below
from lwkv.integrations.vllm.hybrid.scheduler import HybridScheduler
from lwkv.integrations.vllm.hybrid.worker import HybridWorker
from lwkv.integrations.vllm.scheduler.side import Role
from lwkv.keys import ChunkKey
from lwkv.kinds import ChunkSize, Kind, KindIndex
from lwkv.kinds.boundary import find_boundary
from lwkv.platforms.cpu import CPU
from lwkv.telemetry.counters import Counters

TIMEOUT_S = 5.0
Model = test_worker.Model | test_worker_states.Model


@dataclass
class Node:
    """Toy engines one after the other, over one folder."""

    folder: Path
    kinds: Sequence[Kind]
    groups_of: Sequence[int]
    chunk: int
    model: Model | None = None

    @property
    def now(self) -> Model:
        assert self.model is not None
        return self.model

    def start(self, **settings: object) -> Model:
        self.end()
        has_states = any(kind.form == "state" for kind in self.kinds)
        limits = {"max_local_disk_size": 1.0, "load_timeout_s": TIMEOUT_S} | settings
        shape = self.kinds, self.groups_of, self.chunk
        toy = Toy(CPU(), torch.device("cpu"), *shape, local_disk=str(self.folder), **limits)
        size = ChunkSize(self.chunk, self.chunk, self.chunk)
        groups = CacheGroups(tuple(toy.kinds), tuple(toy.group_kinds), size)
        make = partial(self._lower_hits, toy)
        side = HybridScheduler(groups, Role(True, True), make_lower_hits=make)
        worker = HybridWorker(toy.engine, 0)
        side.introduce(worker.introduce())
        made = test_worker_states.Model if has_states else test_worker.Model
        self.model = made(toy, side, worker)
        return self.model

    def _lower_hits(self, toy: Toy, index: KindIndex, counters: Counters) -> LowerHits:
        config = toy.engine.config
        rest = 1, counters, config.load_timeout_s, partial(open_below, config), False
        return LowerHits(toy.kinds, self.chunk, index, *rest)

    def end(self) -> None:
        if self.model is not None:
            self.model.side.close()
            self.model.worker.close()
            self.model = None

    # What there is.

    def on_disk(self) -> set[str]:
        return {name.removesuffix(".kv") for name in os.listdir(self.folder) if name.endswith(".kv")}

    def has(self, kind: int, chunk: bytes, host: bool = True) -> bool:
        engine = self.now.worker.engine
        key = ChunkKey(engine.kind_pages[kind].namespace, chunk)
        return key.to_string() in self.on_disk() or (host and self.in_host(kind, chunk))

    def in_host(self, kind: int, chunk: bytes) -> bool:
        return self.now.side._index.is_everywhere(kind, chunk)

    def expected(self, tokens: Sequence[int]) -> int:
        """The boundary by rule 2, over all that lies anywhere."""
        hashes = self.now.toy.hashes(tokens)
        present = [
            np.array([self.has(kind, chunk) for chunk in hashes], bool) for kind in range(len(self.kinds))
        ]
        return find_boundary(self.now.toy.kinds, self.chunk, len(tokens), 0, present)

    def missing_bytes(self, tokens: Sequence[int], boundary: int) -> int:
        """What the disk has to bring for that, in bytes."""
        engine, hashes, pages = self.now.worker.engine, self.now.toy.hashes(tokens), 0
        for number, kind in enumerate(self.now.toy.kinds):
            first, end = kind.first_needed(boundary) // self.chunk, boundary // self.chunk
            missing = [chunk for chunk in hashes[first:end] if not self.in_host(number, chunk)]
            pages += len(missing) * engine.kind_pages[number].num_pages
        return pages * engine.page_bytes

    def read_bytes(self) -> int:
        return self.now.worker.engine.stats().get("disk_get_bytes", 0)


WINDOWS = ([window(10), full()], [2, 1], 16)
STATES = ([state(8), full()], [2, 1], 8)
Start = Callable[..., Node]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Start]:
    made: list[Node] = []

    def make(shape: tuple[Sequence[Kind], Sequence[int], int], **settings: object) -> Node:
        made.append(Node(tmp_path / "disk", *shape))
        made[-1].start(**settings)
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.mark.parametrize("shape", [WINDOWS, STATES], ids=["windows", "states"])
def test_what_was_computed_before_a_restart_is_loaded_and_no_byte_more_is_read(
    node: Start, shape: tuple[Sequence[Kind], Sequence[int], int]
) -> None:
    here = node(shape)
    tokens = prompt(1, 131)
    assert here.now.ask(tokens) == 0
    here.start()
    needed = here.missing_bytes(tokens, 128)
    assert here.now.ask(tokens) == 128
    assert here.read_bytes() == needed > 0
    assert here.now.ask(tokens + prompt(2, 20)) == 128
    assert here.read_bytes() == needed
    assert here.now.worker.engine.stats()["pins"] == 0


@pytest.mark.parametrize("shape", [WINDOWS, STATES], ids=["windows", "states"])
def test_hits_are_all_that_lies_in_any_tier_and_reads_the_least_where_memory_is_little(
    node: Start, shape: tuple[Sequence[Kind], Sequence[int], int]
) -> None:
    here, chance = node(shape, pages=120), random.Random(3)
    begins = [prompt(seed, 64) for seed in range(4)]
    loaded = 0
    for number in range(24):
        tokens = chance.choice(begins) + prompt(100 + chance.randrange(3), chance.randrange(1, 40))
        if number == 12:
            here.start(pages=120)
        expected, before = here.expected(tokens), here.read_bytes()
        needed = here.missing_bytes(tokens, expected)
        assert here.now.ask(tokens, 16) == expected, number
        assert here.read_bytes() - before == needed, number
        loaded += needed
    assert loaded > 0


def test_a_window_that_is_gone_leaves_the_boundary_before(node: Start) -> None:
    here = node(WINDOWS)
    tokens = prompt(1, 131)
    here.now.ask(tokens)
    last = here.now.toy.hashes(tokens)[7]
    name = here.now.worker.engine.kind_pages[0].namespace
    here.start()
    os.unlink(here.folder / f"{ChunkKey(name, last).to_string()}.kv")
    expected = here.expected(tokens)
    assert expected < 128
    assert here.now.ask(tokens) == expected


@pytest.mark.parametrize("kind", [0, 1])
def test_a_file_that_is_not_what_was_written_is_a_miss_and_set_aside(node: Start, kind: int) -> None:
    here = node(STATES)
    tokens = prompt(1, 131)
    here.now.ask(tokens)
    key = ChunkKey(here.now.worker.engine.kind_pages[kind].namespace, here.now.toy.hashes(tokens)[15])
    here.start()
    path = here.folder / f"{key.to_string()}.kv"
    data = bytearray(path.read_bytes())
    data[-4096] ^= 1
    path.write_bytes(data)
    assert here.now.ask(tokens) < 128
    assert here.now.worker.engine.stats()["disk_corrupt"] == 1
    assert here.now.ask(tokens) == 128  # it was computed and stored again


def test_write_back_writes_at_the_end_what_was_not_written_before(node: Start) -> None:
    here = node(WINDOWS, write_policy="write_back")
    tokens = prompt(1, 131)
    here.now.ask(tokens)
    here.start()
    assert here.now.ask(tokens) == 128


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_request_that_ends_while_it_waits_leaves_nothing_held(node: Start, steps: int) -> None:
    here = node(STATES)
    tokens = prompt(1, 131)
    here.now.ask(tokens)
    here.start()
    request = test_worker.Request("gone", list(tokens))
    here.now.side.num_new_matched_tokens(request, 0)
    for _ in range(steps):
        here.now.step({}, [])
        here.now.side.num_new_matched_tokens(request, 0)
    here.now.step({}, ["gone"])
    here.now.step({}, [])
    engine = here.now.worker.engine
    assert engine.flush(20.0)
    assert engine.lower.prefetches.wait_idle(20.0)
    assert engine.stats()["pins"] == 0
    assert here.now.ask(tokens) == 128


@pytest.mark.parametrize("shape", [WINDOWS, STATES], ids=["windows", "states"])
def test_a_disk_that_freezes_or_loses_all_is_a_miss_and_works_again_after_that(
    node: Start, shape: tuple[Sequence[Kind], Sequence[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = node(shape)
    tokens = prompt(1, 131)
    here.now.ask(tokens)
    here.start(load_timeout_s=0.2)
    disk = FaultyDisk(here.folder, monkeypatch, ("read_run",))
    disk.freeze()
    with monkeypatch.context() as patched:
        patched.setattr(here.now.worker.engine, "flush", lambda timeout_s: True)
        assert here.now.ask(tokens) == 0
    assert here.now.side.counters.totals()["prefetches_given_up"] == 1
    disk.thaw()
    assert here.now.worker.engine.flush(20.0)
    here.start()
    assert here.now.ask(tokens) == 128
    here.start()
    disk.lose_all()
    assert here.now.ask(tokens) == 0


def test_a_look_up_that_fails_is_a_miss_with_a_counter_and_a_line(
    node: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = node(WINDOWS)
    tokens = prompt(1, 131)
    here.now.ask(tokens)
    here.start()

    def fails(*_: object) -> None:
        raise RuntimeError("closed")

    with monkeypatch.context() as patched:
        patched.setattr("lwkv.integrations.vllm.hybrid.lower_hits.find_places", fails)
        assert here.now.ask(tokens) == 0
    assert here.now.side.counters.totals()["look_ups_failed"] == 1
    assert "closed" in caplog.text
    here.start()
    assert here.now.ask(tokens) == 128


def test_a_look_up_that_does_not_end_is_waited_for_as_long_as_anything(
    node: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = node(WINDOWS)
    tokens = prompt(1, 131)
    here.now.ask(tokens)
    here.start(load_timeout_s=0.2)
    goes_on = threading.Event()
    monkeypatch.setattr("lwkv.integrations.vllm.hybrid.lower_hits.find_places", lambda *_: goes_on.wait(20.0))
    assert here.now.ask(tokens) == 0
    goes_on.set()
