"""Transfers and the model's work in the right order, and no wait that could be left out.

Streams here are late where it matters: they do nothing before somebody waits for it. A scenario lets one
side run ahead and the other hang back as far as the recorded events allow. It must give the right bytes as
it is, and wrong ones as soon as its wait is taken away.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import pytest
import torch
from copy_engine import CopyEngine
from oracle import (
    Dims,
    MemoryTier,
    Oracle,
    WrongBytesError,
    held_completions,
    require_rest,
    run_slots,
)

from lwkv.connectors.lane import Lane
from lwkv.engine import CacheEngine, Request
from lwkv.platforms.cpu import CPU
from lwkv.steps import LayerSteps

HOST = torch.device("cpu")
CHUNK = 8
LAYERS = 4
SETTINGS: dict[str, Any] = {}
STREAMS = ("compute", "load copies", "load kernels", "save copies", "save kernels")
MIXES = [mix for count in range(len(STREAMS) + 1) for mix in combinations(STREAMS, count)]
MIXES_OF_ONE = [mix for mix in MIXES if "load copies" not in mix]
NEW, OLD, THIRD = (list(range(first, first + 24)) for first in (500, 900, 700))
FIRST, SECOND = run_slots(3, 24), run_slots(32, 24, backwards=True)


class Stage:
    """An engine beside a model whose work goes to a stream of its own. Staging holds one chunk."""

    def __init__(self, cpu: CPU, buffered: bool = False, **settings: Any) -> None:
        self.cpu = cpu
        self.compute = cpu.new_stream(HOST)
        self.oracle = Oracle(cpu, HOST, dims=Dims(layers=LAYERS, blocks=20))
        settings = {"pages": 64, "lookahead": 1} | SETTINGS | settings
        with cpu.use_stream(self.compute):
            self.engine: CacheEngine = self.oracle.engine(CHUNK, enable_blending=buffered, **settings)

    @property
    def connector(self) -> Any:
        return self.engine.connector

    def stream(self, name: str) -> Any:
        if name == "compute":
            return self.compute
        direction, kind = name.split()
        half = self.connector.loader if direction == "load" else self.connector.saver
        return getattr(half.lane, kind)

    def make_late(self, *names: str) -> None:
        for name in names:
            self.stream(name).late = True

    def reach(self, *names: str) -> None:
        """Let these streams, one after the other, do what they hold."""
        for name in names:
            self.cpu.synchronize_stream(self.stream(name))

    def settle(self) -> None:
        """Let every stream do what it holds, and go on at once from here."""
        for name in STREAMS:
            self.stream(name).late = False
        self.cpu.synchronize_device(HOST)

    def cache(self, tokens: list[int], slots: list[int]) -> None:
        """Have tokens computed and stored, with nothing of it left to do."""
        self.oracle.compute(tokens, slots)
        self.engine.store(tokens, slot_mapping=slots)
        assert self.engine.flush()
        self.settle()

    def load(
        self,
        tokens: list[int],
        slots: list[int],
        read: bool = True,
        sync: bool = True,
        late: tuple[str, ...] = (),
    ) -> None:
        """Retrieve by layers, each read by the model once it has been waited for.

        Streams that are `late` stop behind the first layers, so that the tables of rows are there.
        """
        steps = self.engine.retrieve_layer(tokens, slot_mapping=slots, sync=sync)
        next(steps)
        next(steps)
        self.reach(*late)
        self.make_late(*late)
        for layer in range(LAYERS):
            next(steps)
            if read and sync:
                self.oracle.read(tokens, slots, layer, "the model's reading")
        self.oracle.expect(tokens, slots)
        next(steps, None)

    def save(self, tokens: list[int], slots: list[int]) -> None:
        """Compute and store by layers."""
        steps = self.engine.store_layer(tokens, slot_mapping=slots)
        for layer in range(LAYERS):
            self.oracle.compute(tokens, slots, [layer])
            next(steps)
        next(steps)


@pytest.fixture
def cpu() -> Iterator[CPU]:
    platform = CPU()
    yield platform
    platform.close()


@contextmanager
def staged(cpu: CPU, **settings: Any) -> Iterator[Stage]:
    stage = Stage(cpu, **settings)
    with cpu.use_stream(stage.compute):
        try:
            yield stage
        finally:
            stage.settle()
            stage.engine.close()


Remove = Callable[[Any, str], None]


def load_while_old_readers_hang_back(cpu: CPU, remove: Remove) -> None:
    """Blocks are loaded into that the model still reads for their former request."""
    with staged(cpu) as stage:
        stage.cache(NEW, FIRST)
        stage.oracle.compute(OLD, SECOND)
        stage.settle()
        stage.make_late("compute")
        for layer in range(LAYERS):
            stage.oracle.read(OLD, SECOND, layer, "the former request's reading")
        remove(stage.connector.loader, "_wait_for_readers")
        stage.load(NEW, SECOND)
        stage.reach("load kernels", "compute")
        stage.oracle.check()


def load_into_blocks_with_a_zero_fill_on_its_way(cpu: CPU, remove: Remove) -> None:
    with staged(cpu) as stage:
        stage.cache(NEW, FIRST)
        stage.make_late("compute")
        stage.oracle.zero(SECOND)
        remove(stage.connector.loader, "_wait_for_readers")
        stage.load(NEW, SECOND)
        stage.reach("load kernels", "compute")
        stage.oracle.check()


def load_into_blocks_that_are_cleared_after_they_were_looked_up(cpu: CPU, remove: Remove) -> None:
    """Between the first step and the second an engine prepares its inputs; copies are on their way."""
    with staged(cpu) as stage:
        stage.cache(NEW, FIRST)
        stage.make_late("compute")
        steps = stage.engine.retrieve_layer(NEW, slot_mapping=SECOND)
        next(steps)
        stage.oracle.zero(SECOND)
        remove(stage.connector.loader, "_wait_for_readers")
        assert list(steps)[-1].all()
        stage.oracle.expect(NEW, SECOND)
        stage.reach("load kernels", "compute")
        stage.oracle.check()


def load_beside_a_model_that_runs_ahead(cpu: CPU, remove: Remove, **settings: Any) -> None:
    with staged(cpu, **settings) as stage:
        stage.cache(NEW, FIRST)
        with held_completions(stage.engine):
            remove(stage.connector.loader, "_let_wait")
            stage.load(NEW, SECOND, late=("load copies", "load kernels"))
            stage.reach("compute")
        stage.oracle.check()


def load_into_the_buffer_beside_a_model_that_runs_ahead(cpu: CPU, remove: Remove) -> None:
    load_beside_a_model_that_runs_ahead(cpu, remove, buffered=True)


def load_in_bulk_before_the_model_goes_on(cpu: CPU, remove: Remove) -> None:
    """Without `sync`, the last step's wait is the only one."""
    with staged(cpu) as stage:
        stage.cache(NEW, FIRST)
        stage.make_late("load copies", "load kernels")
        with held_completions(stage.engine):
            remove(stage.connector.loader, "_let_wait")
            stage.load(NEW, SECOND, sync=False)
            for layer in range(LAYERS):
                stage.oracle.read(NEW, SECOND, layer)
            stage.reach("compute")
        stage.oracle.check()


def load_that_is_given_up_and_computed_instead(cpu: CPU, remove: Remove) -> None:
    """The model overwrites what a closed retrieval still has on its way."""
    with staged(cpu) as stage:
        stage.cache(NEW, FIRST)
        stage.make_late("load copies", "load kernels")
        with held_completions(stage.engine):
            steps = stage.engine.retrieve_layer(NEW, slot_mapping=SECOND)
            for _ in range(3):
                next(steps)
            remove(stage.connector.loader, "_let_wait")
            steps.close()
            stage.oracle.compute(OLD, SECOND)
            stage.reach("compute")
        stage.oracle.check()


def load_copies_run_ahead_of_kernels(cpu: CPU, remove: Remove) -> None:
    """More slices than staging buffers: a copy must not fill one that is not emptied."""
    with staged(cpu) as stage:
        stage.cache(NEW, FIRST)
        stage.make_late("load kernels", "compute")
        with held_completions(stage.engine):
            remove(stage.connector.loader.lane, "_wait_emptied")
            stage.load(NEW, SECOND, read=False)
            stage.reach("load copies", "compute")
        stage.oracle.check()


def load_kernels_run_ahead_of_copies(cpu: CPU, remove: Remove) -> None:
    with staged(cpu) as stage:
        stage.cache(NEW, FIRST)
        stage.make_late("load copies")
        with held_completions(stage.engine):
            remove(stage.connector.loader.lane, "pass_on")
            stage.load(NEW, SECOND, read=False)
            stage.reach("load kernels", "compute")
        stage.oracle.check()


def require_stored(stage: Stage) -> None:
    """What was stored, from SECOND, comes back as computed."""
    stage.settle()
    stage.load(NEW, FIRST)
    stage.settle()
    stage.oracle.check()


def save_before_the_model_has_written(cpu: CPU, remove: Remove) -> None:
    with staged(cpu) as stage:
        stage.make_late("compute")
        remove(stage.connector.saver, "_wait_for_writers")
        stage.save(NEW, SECOND)
        assert stage.engine.flush()
        require_stored(stage)


def save_of_a_group_before_the_model_has_written(cpu: CPU, remove: Remove) -> None:
    """Layers that are queued together, the first of them computed on another stream than the last."""
    with staged(cpu, group_bytes=1 << 20) as stage:
        stage.make_late("compute")
        remove(stage.connector.saver, "_wait_for_writers")
        steps, other = stage.engine.store_layer(NEW, slot_mapping=SECOND), cpu.new_stream(HOST)
        for layer in range(LAYERS):
            with cpu.use_stream(stage.compute if layer < LAYERS // 2 else other):
                stage.oracle.compute(NEW, SECOND, [layer])
                next(steps)
        next(steps)
        assert stage.engine.flush()
        require_stored(stage)


def save_kernels_run_ahead_of_copies(cpu: CPU, remove: Remove) -> None:
    """More slices than staging buffers: a kernel must not fill one that is not copied."""
    with staged(cpu) as stage:
        stage.make_late("save copies")
        with held_completions(stage.engine):
            remove(stage.connector.saver.lane, "_wait_emptied")
            stage.save(NEW, SECOND)
            stage.reach("save kernels")
        assert stage.engine.flush()
        require_stored(stage)


def save_copies_run_ahead_of_kernels(cpu: CPU, remove: Remove) -> None:
    with staged(cpu) as stage:
        stage.make_late("save kernels", "compute")
        with held_completions(stage.engine):
            remove(stage.connector.saver.lane, "pass_on")
            stage.save(NEW, SECOND)
            stage.reach("save copies")
        assert stage.engine.flush()
        require_stored(stage)


def blocks_are_reused_after_a_store(cpu: CPU, remove: Remove) -> None:
    with staged(cpu) as stage:
        stage.make_late("save kernels", "save copies")
        remove(stage.connector.saver, "leave_save")
        with held_completions(stage.engine):
            stage.save(NEW, SECOND)
            stage.oracle.compute(OLD, SECOND)
            stage.reach("compute")
        assert stage.engine.flush()
        require_stored(stage)


def a_chunk_becomes_visible_with_its_bytes(cpu: CPU, remove: Remove) -> None:
    with staged(cpu, pages=3 * LAYERS) as stage:
        stage.cache(OLD, FIRST)
        remove(stage.connector.saver, "_wait_for_copies")
        stage.make_late("save copies")
        stage.save(NEW, SECOND)
        assert stage.engine.flush()
        assert stage.engine.lookup(NEW) == 24
        stage.load(NEW, FIRST)
        stage.reach("compute")
        stage.oracle.check()


def host_pages_are_reused_after_a_load(cpu: CPU, remove: Remove) -> None:
    """The pages of a chunk that is on its way are taken for another, which comes from a lower tier."""
    tier = MemoryTier()
    with staged(cpu, tiers=[tier], pages=3 * LAYERS) as stage:
        stage.cache(OLD, SECOND)
        stage.cache(NEW, FIRST)
        stage.make_late("compute", "load copies", "load kernels")
        remove(stage.connector.loader, "end_load")
        stage.load(NEW, SECOND, read=False)
        assert stage.engine.flush()
        stage.load(OLD, FIRST, read=False)
        stage.reach("compute")
        stage.oracle.check()


def tables_are_used_again_after_a_store(cpu: CPU, remove: Remove) -> None:
    """The next store writes its slots into the page-locked table that the one before had."""
    with staged(cpu) as stage:
        stage.make_late("compute", "save copies", "save kernels")
        remove(stage.connector.saver, "_wait_for_copies")
        stage.save(NEW, SECOND)
        assert stage.engine.flush()
        stage.save(OLD, FIRST)
        assert stage.engine.flush()
        require_stored(stage)


def the_buffer_is_filled_while_the_model_still_flushes_it(cpu: CPU, remove: Remove) -> None:
    with staged(cpu, buffered=True, lookahead=0) as stage:
        stage.cache(NEW, FIRST)
        stage.make_late("compute")
        with held_completions(stage.engine):
            remove(stage.connector.loader, "_wait_for_buffer")
            stage.load(NEW, SECOND)
            stage.reach("load kernels", "compute")
        stage.oracle.check()


def the_buffer_s_memory_goes_back_while_the_model_still_flushes_it(cpu: CPU, remove: Remove) -> None:
    """Whoever gets the memory next on the load stream writes to it."""
    with staged(cpu, buffered=True, lookahead=3) as stage:
        stage.cache(NEW, FIRST)
        stage.make_late("compute")
        buffers: list[Any] = []
        loader = stage.connector.loader
        make = loader.new_buffers
        loader.new_buffers = lambda rows: buffers.extend(made := make(rows)) or made
        remove(loader, "_wait_for_buffer")
        stage.load(NEW, SECOND)
        assert stage.engine.flush()
        for buffer in buffers:
            cpu.launch(stage.stream("load kernels"), lambda buffer=buffer: buffer.k.zero_())
        stage.reach("load kernels", "compute")
        stage.oracle.check()


def the_buffer_is_flushed_before_it_is_filled_again(cpu: CPU, remove: Remove) -> None:
    """Without `sync` nobody else waits for a layer before the buffer is needed for another."""
    with staged(cpu, buffered=True, lookahead=0) as stage:
        stage.cache(NEW, FIRST)
        wait_layer = stage.connector.loader.wait_layer
        remove(stage.connector.loader, "wait_layer")
        if stage.connector.loader.wait_layer != wait_layer:
            removed = stage.connector.loader.wait_layer
            stage.connector.loader.wait_layer = lambda load, layer: (
                wait_layer(load, layer) if layer == LAYERS - 1 else removed(load, layer)
            )
        stage.make_late("compute")
        stage.load(NEW, SECOND, sync=False)
        stage.reach("load kernels", "compute")
        stage.oracle.check()


def staging_memory_that_the_model_still_writes(cpu: CPU, remove: Remove) -> None:
    """The allocator hands out memory whose last user on the current stream has not run."""
    lent: list[torch.Tensor] = []
    compute = cpu.new_stream(HOST, late=True)
    make = Lane._new_buffer

    def lend(lane: Lane, device: torch.device, num_bytes: int) -> Any:
        buffer = make(lane, device, num_bytes)
        lent.append(buffer.memory)
        cpu.launch(compute, lambda: buffer.memory.fill_(7))
        return buffer

    with staged(cpu, lookahead=0) as stage:
        stage.cache(NEW, FIRST)
        with pytest.MonkeyPatch.context() as patched, cpu.use_stream(compute):
            patched.setattr(Lane, "_new_buffer", lend)
            remove(Lane, "_wait_for_allocator")
            size = len(stage.connector.loader.lane.buffers[0].memory)
            lane = Lane(cpu, HOST, stage.connector.kernels, 2, size, loads=True)
        stage.connector.loader.lane = lane
        lane.kernels.late = True
        steps = stage.engine.retrieve_layer(NEW[:16], slot_mapping=SECOND[:16])
        next(steps), next(steps)
        cpu.synchronize_stream(lane.copies)
        cpu.synchronize_stream(compute)
        *_, mask = steps
        stage.oracle.expect(NEW[:16], SECOND[:16], mask)
        stage.oracle.check()


WAITS: dict[str, Callable[[CPU, Remove], None]] = {
    scenario.__name__.replace("_", " "): scenario
    for scenario in (
        load_while_old_readers_hang_back,
        load_into_blocks_with_a_zero_fill_on_its_way,
        load_into_blocks_that_are_cleared_after_they_were_looked_up,
        load_beside_a_model_that_runs_ahead,
        load_into_the_buffer_beside_a_model_that_runs_ahead,
        load_in_bulk_before_the_model_goes_on,
        load_that_is_given_up_and_computed_instead,
        load_copies_run_ahead_of_kernels,
        load_kernels_run_ahead_of_copies,
        save_before_the_model_has_written,
        save_of_a_group_before_the_model_has_written,
        save_kernels_run_ahead_of_copies,
        save_copies_run_ahead_of_kernels,
        blocks_are_reused_after_a_store,
        a_chunk_becomes_visible_with_its_bytes,
        host_pages_are_reused_after_a_load,
        tables_are_used_again_after_a_store,
        the_buffer_is_filled_while_the_model_still_flushes_it,
        the_buffer_s_memory_goes_back_while_the_model_still_flushes_it,
        the_buffer_is_flushed_before_it_is_filled_again,
        staging_memory_that_the_model_still_writes,
    )
}


def keep(owner: Any, wait: str) -> None:
    """Leave the wait where it is; it must be there."""
    assert callable(getattr(owner, wait))


def nothing(*_: Any) -> Callable[[], None]:
    """Stands for a wait, or for what returns one."""
    return lambda: None


@pytest.mark.parametrize("name", WAITS)
def test_with_the_wait_the_bytes_are_right(cpu: CPU, name: str) -> None:
    WAITS[name](cpu, keep)


@pytest.mark.parametrize("name", WAITS)
def test_they_are_right_too_where_layers_travel_together(
    cpu: CPU, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LAYERS", 12)
    monkeypatch.setattr(sys.modules[__name__], "SETTINGS", {"pages": 200, "staging_bytes": 1 << 16})
    WAITS[name](cpu, keep)


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("layers", [4, 12])
def test_they_are_right_too_where_loads_have_one_stream(
    cpu: CPU, name: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: dict[str, Any] = {} if layers == LAYERS else {"pages": 200, "staging_bytes": 1 << 16}
    monkeypatch.setattr(sys.modules[__name__], "LAYERS", layers)
    monkeypatch.setattr(sys.modules[__name__], "SETTINGS", {"load_streams": 1, **together})
    WAITS[name](cpu, keep)


@pytest.mark.parametrize("name", WAITS)
def test_they_are_right_too_where_an_event_does_not_cover_copies_to_the_host(name: str) -> None:
    platform = CopyEngine()
    WAITS[name](platform, keep)
    platform.close()


@pytest.mark.parametrize("name", WAITS)
def test_without_the_wait_the_bytes_are_wrong(cpu: CPU, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(owner: Any, wait: str) -> None:
        keep(owner, wait)
        monkeypatch.setattr(owner, wait, nothing)

    with pytest.raises(WrongBytesError):
        WAITS[name](cpu, remove)


@pytest.mark.parametrize("waited", [True, False])
def test_a_load_that_was_never_begun_keeps_its_pages_until_the_first_copies_are_done(
    cpu: CPU, waited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are on their way before any layer is asked for, and nobody ever reads what they bring."""
    with staged(cpu) as stage:
        stage.cache(NEW, FIRST)
        stage.make_late("load copies")
        steps = stage.engine.retrieve_layer(NEW, slot_mapping=SECOND)
        next(steps)
        keep(stage.connector.loader, "_wait_for_prefilled")
        if not waited:
            monkeypatch.setattr(stage.connector.loader, "_wait_for_prefilled", nothing)
        copied = cpu.new_event()
        cpu.record(copied, stage.stream("load copies"))
        steps.close()
        require_rest(stage.engine)
        assert cpu.query(copied) is waited


def test_the_tables_of_a_store_are_nobody_else_s_before_its_last_byte_is_saved(cpu: CPU) -> None:
    with staged(cpu) as stage:
        stage.make_late("save copies", "save kernels")
        with held_completions(stage.engine):
            stage.save(NEW, SECOND)
            assert not any(stage.connector.loader._plans.spare.values())
        assert stage.engine.flush()
        assert sum(len(tables) for tables in stage.connector.loader._plans.spare.values()) == 1


class NeverWaitingCPU(CPU):
    """While `forbidden` is the calling thread, no call may block it."""

    forbidden: threading.Thread | None = None

    def synchronize_event(self, event: Any) -> None:
        self._refuse()
        super().synchronize_event(event)

    def synchronize_stream(self, stream: Any) -> None:
        self._refuse()
        super().synchronize_stream(stream)

    def synchronize_device(self, device: torch.device) -> None:
        self._refuse()
        super().synchronize_device(device)

    def d2h_fence(self, stream: Any, event: Any, waiter: Any = None) -> None:
        if waiter is None:
            self._refuse()
        super().d2h_fence(stream, event, waiter)

    def _refuse(self) -> None:
        if threading.current_thread() is self.forbidden:
            raise AssertionError("the host waits for the device within a step")


@pytest.mark.parametrize("layerwise", [True, False], ids=["layer by layer", "bulk"])
@pytest.mark.parametrize("buffered", [False, True], ids=["paged", "buffer"])
def test_the_host_goes_through_a_step_though_the_device_does_nothing_at_all(
    buffered: bool, layerwise: bool
) -> None:
    cpu = NeverWaitingCPU()
    with staged(cpu, buffered=buffered) as stage:
        stage.cache(NEW, FIRST)
        steps, gate = LayerSteps(stage.engine, layerwise), threading.Event()
        cpu.launch(stage.compute, gate.wait)
        try:
            cpu.forbidden = threading.current_thread()
            steps.begin([Request(NEW, SECOND)], [Request(OLD, FIRST)])
            assert steps.start_load_kv() == [24]
            for layer in range(LAYERS):
                steps.wait_for_layer_load(layer)
                stage.oracle.read(NEW, SECOND, layer)
                stage.oracle.compute(OLD, FIRST, [layer])
                steps.save_kv_layer(layer)
            result = steps.wait_for_save()
        finally:
            cpu.forbidden = None
            gate.set()
        stage.oracle.expect(NEW, SECOND)
        assert (result.loaded[0].all(), result.stored) == (True, True)
        require_rest(stage.engine)
        assert stage.engine.lookup(OLD) == 24
        stage.oracle.check()
    cpu.close()


def run_mixed(stage: Stage) -> None:
    """Stores, loads and reuse of blocks, one behind the other, the host running ahead."""
    stage.save(OLD, FIRST)
    stage.oracle.compute(NEW, FIRST)
    stage.save(NEW, SECOND)
    assert stage.engine.flush()
    for layer in range(LAYERS):
        stage.oracle.read(NEW, SECOND, layer, "the former request's reading")
    stage.oracle.zero(SECOND)
    stage.load(OLD, SECOND)
    stage.save(THIRD, FIRST)
    steps = stage.engine.retrieve_layer(NEW, slot_mapping=FIRST)
    next(steps), next(steps)
    steps.close()
    stage.oracle.compute(OLD, FIRST)
    stage.load(NEW, SECOND, sync=False)
    stage.oracle.read(NEW, SECOND, LAYERS - 1)
    require_rest(stage.engine)
    stage.oracle.check()


@pytest.mark.parametrize("buffered", [False, True], ids=["paged", "buffer"])
@pytest.mark.parametrize("late", MIXES, ids=[", ".join(mix) or "none" for mix in MIXES])
def test_whatever_hangs_back_the_bytes_are_right(cpu: CPU, late: tuple[str, ...], buffered: bool) -> None:
    with staged(cpu, buffered=buffered, lookahead=len(late) % 3) as stage:
        stage.make_late(*late)
        run_mixed(stage)


@pytest.mark.parametrize("buffered", [False, True], ids=["paged", "buffer"])
@pytest.mark.parametrize("late", MIXES_OF_ONE, ids=[", ".join(mix) or "none" for mix in MIXES_OF_ONE])
def test_whatever_hangs_back_the_bytes_are_right_where_loads_have_one_stream(
    cpu: CPU, late: tuple[str, ...], buffered: bool
) -> None:
    with staged(cpu, buffered=buffered, lookahead=len(late) % 3, load_streams=1) as stage:
        assert stage.stream("load copies") is stage.stream("load kernels")
        stage.make_late(*late)
        run_mixed(stage)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("load_streams", [1, 2])
def test_whatever_is_slow_the_bytes_are_right(seed: int, load_streams: int) -> None:
    rng = random.Random(seed)
    cpu = CPU(delay=lambda: rng.choice([0.0, 0.0, 0.0, 0.001]))
    with staged(cpu, buffered=seed % 2 == 1, load_streams=load_streams) as stage:
        run_mixed(stage)
    cpu.close()
