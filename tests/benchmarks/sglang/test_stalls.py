"""Where a model waits for a load, found by events on its stream."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from lwkv.benchmarks.sglang.stalls import EVERY, Stalls, stall_table
from lwkv.platforms.cpu import CPU

LAYERS = 3


@pytest.fixture
def cpu(platform: CPU) -> CPU:
    return platform


def run(cpu: CPU, stalls: Stalls, index: int, wait: Callable[[int], None]) -> dict[str, float]:
    stalls.begin(index)
    for layer in range(LAYERS):
        for _ in range(2):  # the pool asks for K and for V
            is_marked = stalls.before(index, layer)
            wait(layer)
            if is_marked:
                stalls.behind()
    while not stalls.is_over():
        time.sleep(0.001)
    return stalls.take(index)


def test_the_first_wait_is_told_from_the_others(cpu: CPU) -> None:
    device = cpu.current_device()
    stream = cpu.current_stream(device)

    def wait(layer: int) -> None:
        if layer == 0:
            cpu.launch(stream, lambda: time.sleep(0.05))

    found = run(cpu, Stalls(cpu, device), 0, wait)
    assert found["first wait"] >= 50
    assert set(found) == {"first wait", "other waits", "a layer"}
    assert "first wait" in stall_table("lwkv", [found])


def test_only_some_loads_are_marked_and_no_other_batch(cpu: CPU) -> None:
    stalls = Stalls(cpu, cpu.current_device())
    assert run(cpu, stalls, 1, lambda _: None) == {}
    assert run(cpu, stalls, -1, lambda _: None) == {}
    stalls.begin(EVERY)
    assert not stalls.before(1, 0)
    assert stalls.take(1) == {}
    assert stall_table("lwkv", []) == ""
