"""What a connector takes at its start, and that it gives everything back, but nothing that is in use."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from oracle import Oracle, held_completions, require_rest, run_slots
from torch import Tensor

from lwkv.config.settings import Config
from lwkv.connectors import paged
from lwkv.engine import CacheEngine
from lwkv.kernels import Rows, TorchKernels, Turn
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import Platform

TOKENS = list(range(21))
HERE, THERE = run_slots(0, 21), run_slots(32, 21)
buffered = pytest.mark.parametrize("buffered", [False, True], ids=["paged", "buffer"])


@pytest.fixture
def oracle(platform: Platform, device: torch.device) -> Oracle:
    return Oracle(platform, device)


def store(oracle: Oracle, engine: Any) -> None:
    oracle.compute(TOKENS, HERE)
    engine.store(TOKENS, slot_mapping=HERE)
    assert engine.flush()


def staging_of(connector: Any) -> list[weakref.ref[Tensor]]:
    lanes = connector.loader.lane, connector.saver.lane
    return [weakref.ref(buffer.memory) for lane in lanes for buffer in lane.buffers]


def alive(references: list[weakref.ref[Tensor]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


class NotedKernels(TorchKernels):
    """Writes down what each kernel would be compiled for, and its number of rows."""

    def __init__(self) -> None:
        self.launched: list[tuple[tuple[object, ...], int]] = []

    def scatter(self, layer: PagedLayer, staging: Tensor, rows: Rows, turn: Turn | None = None) -> None:
        self._note("scatter", layer, rows)
        super().scatter(layer, staging, rows, turn)

    def gather(self, layer: PagedLayer, staging: Tensor, rows: Rows) -> None:
        self._note("gather", layer, rows)
        super().gather(layer, staging, rows)

    def _note(self, name: str, layer: PagedLayer, rows: Rows) -> None:
        form = [(view.dtype, view.shape[1:], view.stride(), view.data_ptr() % 16) for view in layer.words]
        self.launched.append(((name, *form), len(rows.slots)))


@buffered
def test_every_kernel_is_launched_without_rows_at_the_start(
    oracle: Oracle, buffered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels are compiled, that is the time for it: no request brings a new one."""
    kernels = NotedKernels()
    monkeypatch.setattr(paged, "choose_kernels", lambda platform: kernels)
    with oracle.engine(8, save_unfull_chunk=True, enable_blending=buffered) as engine:
        oracle.platform.synchronize_device(oracle.device)
        at_start, kernels.launched = kernels.launched, []
        assert all(num_rows == 0 for _, num_rows in at_start)
        store(oracle, engine)
        assert engine.retrieve(TOKENS, slot_mapping=THERE).all()
        oracle.platform.synchronize_device(oracle.device)
        assert kernels.launched
        assert {form for form, _ in kernels.launched} <= {form for form, _ in at_start}


def test_without_use_gpu_staging_is_a_page_a_buffer_and_loads_are_the_same(oracle: Oracle) -> None:
    sizes = []
    for use_gpu in (True, False):
        extra = {"staging_bytes": 1 << 20} if use_gpu else {}
        config = Config(chunk_size=8, use_gpu=use_gpu, max_local_cpu_size=2**-8, extra_config=extra)
        with CacheEngine.create(
            config, oracle.metadata, oracle.kvcaches, "vllm", {"block_size": 4}, oracle.platform
        ) as engine:
            connector: Any = engine.connector
            sizes.append(len(connector.loader.lane.buffers[0].memory))
            store(oracle, engine)
            mask = engine.retrieve(TOKENS, slot_mapping=THERE)
            assert int(mask.sum()) == 16
            oracle.expect(TOKENS, THERE, mask)
            oracle.check()
    assert sizes == [(1 << 20) // 6 // 512 * 512 + 512, 512]
    assert oracle.page_bytes(8) <= 512


@buffered
def test_a_closed_engine_has_no_staging_tables_or_streams(oracle: Oracle, buffered: bool) -> None:
    engine = oracle.engine(8, enable_blending=buffered)
    connector: Any = engine.connector
    store(oracle, engine)
    assert engine.retrieve(TOKENS, slot_mapping=THERE).any()
    assert engine.flush()
    held = staging_of(connector)
    held += [weakref.ref(table.pinned) for spare in connector.loader._plans.spare.values() for table in spare]
    assert alive(held) > 4
    engine.close()
    assert alive(held) == 0
    engine.close()


@buffered
def test_a_load_still_open_when_its_engine_closes_ends_as_ever(oracle: Oracle, buffered: bool) -> None:
    engine = oracle.engine(8, enable_blending=buffered)
    store(oracle, engine)
    held = staging_of(engine.connector)
    steps = engine.retrieve_layer(TOKENS, slot_mapping=THERE)
    next(steps), next(steps)
    engine.close()
    assert alive(held) >= 2
    *_, mask = steps
    oracle.expect(TOKENS, THERE, mask)
    oracle.check()
    assert int(mask.sum()) == 16
    del steps
    assert engine.flush()
    assert alive(held) == 0


@buffered
def test_a_save_still_open_when_its_engine_closes_ends_as_ever(oracle: Oracle, buffered: bool) -> None:
    engine = oracle.engine(8, enable_blending=buffered)
    held = staging_of(engine.connector)
    oracle.compute(TOKENS, HERE)
    steps = engine.store_layer(TOKENS, slot_mapping=HERE)
    next(steps)
    engine.close()
    assert alive(held) >= 2
    for _ in steps:
        pass
    del steps
    assert engine.flush()
    assert alive(held) == 0


def test_staging_outlives_an_engine_that_was_dropped_until_the_device_is_done(oracle: Oracle) -> None:
    """Nobody closed it: the memory must not go to others while copies and kernels are still to come."""
    engine = oracle.engine(8)
    store(oracle, engine)
    held = staging_of(engine.connector)
    completions = engine._completions
    with held_completions(engine):
        engine.retrieve(TOKENS, slot_mapping=THERE)
        oracle.compute(TOKENS[::-1], HERE)
        engine.store(TOKENS[::-1], slot_mapping=HERE)
        del engine
        assert alive(held) == len(held)
    assert completions.wait_idle(20.0)
    assert alive(held) == 0


def test_the_engine_s_threads_use_the_device_of_its_caches(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that does not would be on the first device, whichever the caches are on."""
    used: dict[str, torch.device] = {}
    monkeypatch.setattr(
        type(oracle.platform),
        "set_device",
        lambda _, device: used.setdefault(threading.current_thread().name, device),
    )
    with oracle.engine(8, pages=400) as engine:
        store(oracle, engine)
        assert engine._storage._growth.wait_idle(20.0)
        require_rest(engine)
    assert used == {"lwkv-completions": oracle.device, "lwkv-growth-0": oracle.device}
