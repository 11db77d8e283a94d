"""Memory of the simulated device: what stays, what is reused, what is page-locked."""

from __future__ import annotations

import gc
from types import ModuleType

import pytest
import torch

DEVICE = torch.device("musa", 0)
POISON = 0xDB


def filled(value: int) -> torch.Tensor:
    return torch.full((64,), value, dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_freed_while_another_stream_reads_it_is_poison_unless_recorded(
    simulator: ModuleType, recorded: bool
) -> None:
    reader = torch.musa.Stream()
    source, target = filled(3), torch.zeros(64, dtype=torch.uint8).pin_memory()
    torch.musa.synchronize()
    simulator.set_late(True, reader)
    with torch.musa.stream(reader):
        target.copy_(source, non_blocking=True)
    if recorded:
        source.record_stream(reader)
    del source
    torch.musa.current_stream().synchronize()
    reader.synchronize()
    assert set(target.tolist()) == {3 if recorded else POISON}


def test_freed_memory_is_reused_at_once_by_its_own_stream(late: None) -> None:
    source = filled(3)
    address = source.data_ptr()
    copy = source + 1
    del source
    again = filled(9)
    assert again.data_ptr() == address
    assert set(copy.tolist()) == {4}
    assert set(again.tolist()) == {9}


def test_pinned_memory_freed_early_lasts_until_its_copies_are_done(late: None) -> None:
    target = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    source = torch.full((64,), 6, dtype=torch.uint8).pin_memory()
    address = source.data_ptr()
    target.copy_(source, non_blocking=True)
    del source
    assert torch.empty(64, dtype=torch.uint8, pin_memory=True).data_ptr() != address
    assert set(target.tolist()) == {6}


def test_pageable_memory_freed_early_is_an_error(late: None) -> None:
    target = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    target.copy_(torch.full((64,), 6, dtype=torch.uint8), non_blocking=True)
    with pytest.raises(RuntimeError, match="freed before a queued copy"):
        torch.musa.current_stream().synchronize()


def test_registered_memory_that_is_unregistered_early_is_an_error(late: None) -> None:
    memory = torch.full((64,), 6, dtype=torch.uint8)
    runtime = torch.musa.musart()
    assert int(runtime.musaHostRegister(memory.data_ptr(), 64, 1)) == 0
    target = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    target.copy_(memory, non_blocking=True)
    assert int(runtime.musaHostUnregister(memory.data_ptr())) == 0
    with pytest.raises(RuntimeError, match="unregistered before a queued copy"):
        torch.musa.current_stream().synchronize()


def test_registering_makes_memory_pinned_once() -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    runtime = torch.musa.musart()
    assert not memory.is_pinned()
    done = runtime.musaHostRegister(memory.data_ptr(), 4096, 1)
    assert done == runtime.musaError.success
    assert done != 0, "an enumeration, as pybind11 makes them, equals no int"
    assert memory.is_pinned()
    assert memory[77:].is_pinned()
    assert int(runtime.musaHostRegister(memory.data_ptr(), 4096, 1)) == 712
    assert int(runtime.musaHostUnregister(memory.data_ptr())) == 0
    assert not memory.is_pinned()
    assert int(runtime.musaHostUnregister(memory.data_ptr())) == 713


def test_pinned_allocations_are_pinned_and_lie_on_pages() -> None:
    memory = torch.empty(3 * 4096 + 1, dtype=torch.uint8, pin_memory=True)
    assert memory.is_pinned()
    assert memory[5:].is_pinned()
    assert memory.data_ptr() % 4096 == 0
    assert torch.ones(3).pin_memory().is_pinned()
    assert not torch.ones(3).is_pinned()


def test_device_memory_is_counted_and_has_an_end() -> None:
    gc.collect()
    free, total = torch.musa.mem_get_info(1)
    block = torch.empty(8192, dtype=torch.uint8, device="musa:1")
    assert torch.musa.mem_get_info(1) == (free - 8192, total)
    assert torch.musa.mem_get_info(DEVICE)[1] == total
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total, dtype=torch.uint8, device="musa:1")
    del block
    assert torch.musa.mem_get_info(1) == (free, total)


def test_quirks_of_torch_musa_are_kept(simulator: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="synchronizing all streams"):
        torch.accelerator.synchronize()
    with pytest.raises(RuntimeError, match="not a DeviceAllocator"):
        torch.accelerator.memory_stats()
    simulator.set_synchronizes_device(True)
    torch.accelerator.synchronize()
    simulator.set_synchronizes_device(False)


@pytest.mark.parametrize("name", ["cudart", "memory_stats_as_nested_dict", "graph", "host_register"])
def test_a_name_that_was_not_recorded_is_missing(name: str) -> None:
    with pytest.raises(AttributeError):
        getattr(torch.musa, name)
