from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from lwkv.benchmarks.throttled import model as throttled_model
from lwkv.benchmarks.throttled.model import HostModel, StreamModel, products
from lwkv.platforms import Platform
from lwkv.platforms.cpu import CPU

SECONDS = 1e-3


def test_the_host_goes_on_while_a_model_computes_on_its_stream() -> None:
    cpu, computed = CPU(), threading.Event()
    device = cpu.current_device()
    model, loads, arrived = StreamModel(cpu, device, SECONDS), cpu.new_stream(device), threading.Event()
    cpu.launch(loads, partial(arrived.wait, 60))
    with model.running():
        stream = cpu.current_stream(device)
        cpu.wait_stream(stream, loads)
        model.compute()
        cpu.launch(stream, computed.set)
    assert not computed.is_set()
    arrived.set()
    cpu.synchronize_device(device)
    assert computed.is_set()
    assert model.layer_ms() >= SECONDS * 1e3
    cpu.close()


def test_the_host_waits_for_a_layer_before_a_model_computes_on_its_thread() -> None:
    cpu = CPU()
    device = cpu.current_device()
    model, loads, arrived = HostModel(cpu, device, SECONDS), cpu.new_stream(device, late=True), []
    with cpu.use_stream(loads):
        cpu.launch(loads, partial(arrived.append, True))
        with model.running():
            model.compute()
    assert arrived
    assert model.layer_ms() >= SECONDS * 1e3
    cpu.close()


@pytest.mark.parametrize("make", [StreamModel, HostModel])
def test_a_model_tells_of_each_layer_once(
    make: type[StreamModel | HostModel], platform: Platform, device: torch.device
) -> None:
    model = make(platform, device, SECONDS)
    for _ in range(2):
        with model.running():
            model.compute()
        platform.synchronize_device(device)
        assert model.layer_ms() > 0


def test_products_keep_the_device_busy_for_the_shortest_time_as_well(
    platform: Platform, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throttled_model, "SIDE", 3)
    counted: list[object] = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: counted.append(mm(*args, **kwargs)))
    products(platform, device, 0.0)
    tried = len(counted)
    products(platform, device, 0.0)()
    assert len(counted) == 2 * tried + 1
