"""Batches that end before their last step: on other threads, under other streams, by the collector."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracle import Dims, Oracle, held_completions, require_rest, run_slots

from lwkv.engine import CacheEngine
from lwkv.platforms.cpu import CPU

HOST = torch.device("cpu")
CHUNK = 8
LAYERS = 3
LONG_S = 20.0
CACHED, OTHER, FRESH = (list(range(first, first + 16)) for first in (100, 300, 500))
FROM, INTO, AWAY = run_slots(0, 16), run_slots(20, 16), run_slots(40, 16)


class Stage:
    """An engine with CACHED in host memory, beside a model with a stream of its own."""

    def __init__(self, cpu: CPU, buffered: bool = False) -> None:
        self.cpu = cpu
        self.model = cpu.new_stream(HOST)
        self.oracle = Oracle(cpu, HOST, dims=Dims(layers=LAYERS))
        self.engine: CacheEngine = self.oracle.engine(CHUNK, lookahead=3, enable_blending=buffered)
        with cpu.use_stream(self.model):
            self.oracle.compute(CACHED, FROM)
            self.engine.store(CACHED, slot_mapping=FROM)
            assert self.engine.flush()

    def lane(self, name: str) -> list[Any]:
        connector = self.engine.connector
        lane = connector.loader.lane if name == "load" else connector.saver.lane
        return [lane.kernels, lane.copies]

    def begin(self, kind: str) -> Any:
        """A batch that has taken some of its steps."""
        steps: Any
        if kind == "store":
            steps = self.engine.store_layer(FRESH, slot_mapping=AWAY)
            self.oracle.compute(FRESH, AWAY)
        else:
            slots = INTO if kind == "load" else [-1] * 16
            steps = self.engine.retrieve_layer(CACHED, slot_mapping=slots)
        next(steps)
        if kind == "load":
            next(steps), next(steps)
        return steps


@pytest.fixture
def cpu() -> Iterator[CPU]:
    platform = CPU()
    yield platform
    platform.close()


def on_a_thread(work: Callable[[], object]) -> None:
    """Run `work` on a thread, which a deadlock does not keep the test from failing."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert not thread.is_alive(), "deadlock"


def close_here(stage: Stage, box: list[Any]) -> None:
    box.pop().close()


def close_under_another_stream(stage: Stage, box: list[Any]) -> None:
    with stage.cpu.use_stream(stage.cpu.new_stream(HOST, late=True)):
        box.pop().close()


def close_on_another_thread(stage: Stage, box: list[Any]) -> None:
    on_a_thread(lambda: close_under_another_stream(stage, box))


def drop_on_another_thread(stage: Stage, box: list[Any]) -> None:
    def drop() -> None:
        with stage.cpu.use_stream(stage.cpu.new_stream(HOST, late=True)):
            box.clear()

    on_a_thread(drop)


ENDS = [close_here, close_under_another_stream, close_on_another_thread, drop_on_another_thread]


@pytest.mark.parametrize("buffered", [False, True], ids=["paged", "buffer"])
@pytest.mark.parametrize("end", ENDS)
def test_the_model_s_next_writes_come_behind_a_load_that_is_given_up(
    cpu: CPU, end: Callable[[Stage, list[Any]], None], buffered: bool
) -> None:
    stage = Stage(cpu, buffered)
    with held_completions(stage.engine), cpu.use_stream(stage.model):
        for stream in stage.lane("load"):
            stream.late = True
        end(stage, [stage.begin("load")])
        stage.oracle.compute(OTHER, INTO)
        cpu.synchronize_stream(stage.model)
        for stream in stage.lane("load"):
            stream.late = False
    stage.oracle.check()
    require_rest(stage.engine)
    stage.engine.close()


@pytest.mark.parametrize("end", ENDS)
def test_the_model_s_next_writes_come_behind_what_a_store_that_is_given_up_reads(
    cpu: CPU, end: Callable[[Stage, list[Any]], None]
) -> None:
    stage, read = Stage(cpu), cpu.new_event()
    with held_completions(stage.engine), cpu.use_stream(stage.model):
        for stream in stage.lane("save"):
            stream.late = True
        box = [stage.begin("store")]
        cpu.record(read, stage.lane("save")[0])
        end(stage, box)
        cpu.synchronize_stream(stage.model)
        assert cpu.query(read)
        for stream in stage.lane("save"):
            stream.late = False
    require_rest(stage.engine)
    stage.engine.close()


class CollectingLock:
    """A lock within which the collector runs: it may come at any allocation."""

    def __init__(self, lock: Any) -> None:
        self._lock, self.entered = lock, 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.entered += 1
        gc.collect()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


LOCKS: dict[str, Callable[[CacheEngine], Any]] = {
    "host tier": lambda engine: engine._storage.host,
    "storage manager": lambda engine: engine._storage,
    "pool": lambda engine: engine._pool,
    "counters": lambda engine: engine.parts().counters,
    "growth": lambda engine: engine._storage._growth._queue,
}


@contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["load", "load of nothing", "store"])
@pytest.mark.parametrize("name", LOCKS)
def test_a_batch_may_be_finalized_on_a_thread_that_holds_a_lock(cpu: CPU, name: str, kind: str) -> None:
    stage = Stage(cpu)
    owner = LOCKS[name](stage.engine)
    lock = CollectingLock(owner._lock)
    with cpu.use_stream(stage.model), without_collector():
        cycle = [stage.begin(kind)]
        cycle.append(cycle)
        owner._lock = lock
        del cycle

        def go_on() -> None:
            with cpu.use_stream(stage.model):
                stage.engine.retrieve(CACHED, slot_mapping=run_slots(4, 16))
                stage.engine.store(OTHER, slot_mapping=FROM)
                stage.engine.stats()
                stage.engine.flush()

        on_a_thread(go_on)
    assert lock.entered
    owner._lock = lock._lock
    gc.collect()
    require_rest(stage.engine)
    stage.engine.close()


@pytest.mark.parametrize("kind", ["load", "load of nothing", "store"])
@pytest.mark.parametrize("where", ["model", "load kernels", "load copies", "save kernels"])
def test_a_batch_may_be_finalized_on_the_thread_of_a_stream(cpu: CPU, where: str, kind: str) -> None:
    """In an operation that all the others wait for."""
    stage = Stage(cpu)
    stream = stage.model if where == "model" else stage.lane(where.split()[0])[where.endswith("copies")]
    gate, ended = threading.Event(), threading.Event()
    with cpu.use_stream(stage.model):
        stream.put(lambda: gate.wait(LONG_S))
        box: list[Any] = []
        stream.put(lambda: (box.clear(), ended.set()))
        box.append(stage.begin(kind))
        gate.set()
        assert ended.wait(LONG_S), "deadlock"
        stage.oracle.compute(OTHER, INTO)
        cpu.synchronize_stream(stage.model)
    stage.oracle.check()
    require_rest(stage.engine)
    stage.engine.close()


def test_a_load_is_released_even_if_the_model_cannot_be_made_to_wait(
    cpu: CPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(cpu)

    def refuse(*_: Any) -> None:
        raise RuntimeError("no wait, says the test")

    steps = stage.begin("load")
    with monkeypatch.context() as refused:
        refused.setattr(stage.engine.connector.loader, "_let_wait", refuse)
        steps.close()
    require_rest(stage.engine)
    assert stage.engine.stats()["transfer_errors"] == 1
    stage.engine.close()


def test_closing_again_finishes_what_took_too_long(cpu: CPU) -> None:
    stage = Stage(cpu)
    with held_completions(stage.engine):
        stage.begin("load").close()
        stage.engine.close(timeout_s=0.001)
        assert stage.engine.stats()["pins"] == 2
    stage.engine.close(timeout_s=float("inf"))
    assert stage.engine.flush(1e10)
    assert stage.engine.stats()["page_references"] == 0
