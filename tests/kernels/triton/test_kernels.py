"""What only the Triton kernels promise: rows out of range are left out, and offsets pass 2**31."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from oracle import Dims, Oracle, run_slots
from torch import Tensor

from lwkv.connectors import BufferConnector, Rope
from lwkv.engine import CacheEngine
from lwkv.kernels import Kernels, Rows, StagedLayers, Turn, choose_kernels
from lwkv.layouts.layout import KVSpec, PagedLayer, describe_layers
from lwkv.platforms import Platform
from lwkv.transfer import Transfer

OUTSIDE = [-1, 12, 2**40, -(2**40)]


@pytest.fixture
def best(platform: Platform) -> Kernels:
    return choose_kernels(platform)


def make_layer(device: torch.device) -> tuple[Tensor, PagedLayer]:
    cache = torch.arange(2 * 3 * 4 * 2 * 8, dtype=torch.float32, device=device).view(2, 3, 4, 2, 8)
    return cache, describe_layers([cache], KVSpec(2, 8, 4))[0]


def rows_of(device: torch.device, *numbers: list[int]) -> Rows:
    return Rows(*(torch.tensor(n, device=device) for n in numbers))


@pytest.mark.parametrize("outside", OUTSIDE)
def test_a_slot_out_of_range_is_left_out(
    outside: int, best: Kernels, run: Callable, device: torch.device
) -> None:
    cache, layer = make_layer(device)
    before = cache.clone()
    staging = torch.zeros(6 * layer.row_bytes, dtype=torch.uint8, device=device)
    rows = rows_of(device, [2, outside, 5], [0, 1, 2], [3, 4, 5])
    run(lambda: best.gather(layer, staging, rows))
    got = staging.view(torch.float32).view(6, 2, 8)
    assert torch.equal(got[[0, 2, 3, 5]], before.flatten(1, 2)[:, [2, 5]].flatten(0, 1))
    assert not got[[1, 4]].any()
    staging.fill_(0)
    run(lambda: best.scatter(layer, staging, rows))
    before.flatten(1, 2)[:, [2, 5]] = 0
    assert torch.equal(cache, before)


@pytest.mark.parametrize("outside", [-1, 6, 2**40])
def test_a_staging_row_out_of_range_is_left_out(
    outside: int, best: Kernels, run: Callable, device: torch.device
) -> None:
    cache, layer = make_layer(device)
    before = cache.clone()
    staging = torch.zeros(6 * layer.row_bytes, dtype=torch.uint8, device=device)
    turn = Turn(*torch.ones(2, 1, 4, device=device), torch.zeros(3, dtype=torch.int64, device=device), False)
    rows = rows_of(device, [2, 9, 5], [0, outside, 2], [3, 4, outside])
    for how in (None, turn):
        cache.copy_(before)
        staged = StagedLayers([layer], staging, 0, rows, how)
        run(lambda staged=staged: best.move_layers(True, staged))
        wanted = before.clone().flatten(1, 2)
        wanted[0, [2, 5]] = 0
        wanted[1, [2, 9]] = 0
        assert torch.equal(cache.flatten(1, 2), wanted)


def test_rows_past_2_to_the_31_elements_are_reached(
    best: Kernels, run: Callable, device: torch.device
) -> None:
    blocks = 2**31 // (16 * 64) + 3
    cache = torch.empty(blocks, 16, 64, dtype=torch.uint8, device=device)
    cache[-1] = torch.arange(16 * 64, device=device).view(16, 64).to(torch.uint8)
    cache[0] = 9
    (layer,) = describe_layers([cache], KVSpec(1, 64, 16, use_mla=True))
    staging = torch.zeros(2 * 64, dtype=torch.uint8, device=device)
    rows = rows_of(device, [layer.num_rows - 1, layer.num_rows - 2], [0, 1], [0, 1])
    run(lambda: best.gather(layer, staging, rows))
    assert torch.equal(staging.view(2, 64), cache[-1, [15, 14]])
    run(lambda: best.scatter(layer, staging, rows_of(device, [layer.num_rows - 2, 0], [0, 1], [0, 1])))
    assert torch.equal(cache[-1, 14], cache[-1, 15])
    assert torch.equal(cache[0, 0], staging[64:])
    assert cache[0, 1:].eq(9).all()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for every kernel that was compiled."""
    from lwkv.kernels.triton import launch

    calls: list[object] = []
    original = launch.compiled_kernel
    monkeypatch.setattr(launch, "compiled_kernel", lambda *a: calls.append(a) or original(*a))
    return calls


def test_a_layer_compiles_once_for_any_number_and_alignment_of_rows(
    best: Kernels, run: Callable, device: torch.device, compiled: list[object]
) -> None:
    _, layer = make_layer(device)
    staging = torch.zeros(64 * layer.row_bytes, dtype=torch.uint8, device=device)
    numbers = torch.arange(12, device=device)
    for first, last in [(0, 0), (0, 1), (1, 3), (3, 12), (0, 12)]:
        part = numbers[first:last]
        run(lambda part=part: best.scatter(layer, staging, Rows(part, part, part + 12)))
    assert len(compiled) == 1


def test_layers_of_one_form_share_what_was_compiled(
    best: Kernels, run: Callable, device: torch.device, compiled: list[object]
) -> None:
    """They differ in their addresses and their number of blocks."""
    staging = torch.zeros(64 * 64, dtype=torch.uint8, device=device)
    rows = rows_of(device, [2, 5], [0, 1], [2, 3])
    for blocks in (3, 3, 7):
        cache = torch.ones(blocks, 2, 4, 2, 8, device=device)
        (layer,) = describe_layers([cache], KVSpec(2, 8, 4), "vllm_b2nhd")
        run(lambda layer=layer: best.scatter(layer, staging, rows))
        run(lambda layer=layer: best.gather(layer, staging, rows))
        assert not cache.transpose(1, 2).flatten(0, 1)[[2, 5]].any()
        assert cache.transpose(1, 2).flatten(0, 1)[[0, 1, 3, 4]].eq(1).all()
    assert len(compiled) == 2


def test_nothing_is_compiled_after_the_start(
    platform: Platform, device: torch.device, compiled: list[object]
) -> None:
    """Loads and saves of several lengths, plain and through the buffer, with keys turned and without."""
    for settings in ({}, {"enable_blending": True}):
        oracle = Oracle(platform, device, dims=Dims(layers=3, blocks=40, head_size=6))
        engine = oracle.engine(8, save_unfull_chunk=True, **settings)
        connector = engine.connector
        if isinstance(connector, BufferConnector):
            connector.set_rope(Rope((1.0, 0.2, 0.03)))
        platform.synchronize_device(device)
        number = len(compiled)
        for count in (8, 21, 37):
            tokens = [count + i for i in range(count)]
            oracle.compute(tokens, run_slots(0, count))
            engine.store(tokens, slot_mapping=run_slots(0, count))
            assert engine.flush()
            assert engine.retrieve(tokens, slot_mapping=run_slots(80, count)).all()
            oracle.expect(tokens, run_slots(80, count))
            oracle.check()
            if isinstance(connector, BufferConnector):
                load_turned(engine, tokens, run_slots(120, count))
                oracle.forget(run_slots(120, count), np.ones(count, bool))
        assert len(compiled) == number
        engine.close()


def load_turned(engine: CacheEngine, tokens: list[int], slots: list[int]) -> None:
    connector, counts = engine.connector, engine._chunking.chunk_tokens(len(tokens))
    assert isinstance(connector, BufferConnector)
    hold = engine._storage.hold(engine._prompt_keys.keys(np.array(tokens), ()))
    load = connector.loader.begin_load(Transfer(counts, np.array(slots)), shift=np.full(len(slots), 7))
    for layer in range(engine.num_layers):
        connector.loader.load_layer(load, layer, hold.host_pages(layer))
        connector.loader.wait_layer(load, layer)
    connector.loader.leave_load(load)
    connector.loader.end_load(load)
    hold.release()
