from __future__ import annotations

import re

import pytest
import torch
from oracle import Dims, Oracle

import lwkv.engine
from lwkv.config.settings import Config
from lwkv.errors import ConfigError
from lwkv.platforms import Platform
from lwkv.platforms.host_limits import MemoryLimit
from lwkv.pool.memory_limits import check_memory, warning_of

GIB = 1 << 30
CONTAINER = MemoryLimit("the container's memory limit (/x)", 3 * GIB // 2, GIB, True)
MACHINE = MemoryLimit("the machine's memory", 23 * GIB, 20 * GIB, False)
LIMITS = [CONTAINER, MACHINE]


def config(gib: float, reserve: float = 0.0) -> Config:
    return Config(max_local_cpu_size=gib, extra_config={"reserve_gib": reserve})


@pytest.mark.parametrize(
    ("gib", "reserve", "limits", "told"),
    [
        (
            *(100, 0, LIMITS),
            r"max_local_cpu_size: got 100 GiB, but the container's memory limit \(/x\) is 1.50 GiB: .*lower "
            "max_local_cpu_size, or give the container more .*resources.limits.memory",
        ),
        (
            1000,
            0,
            [MACHINE],
            r"got 1000 GiB, but the machine's memory is 23.00 GiB.*lower max_local_cpu_size$",
        ),
        (
            1.4,
            1.2,
            LIMITS,
            r"reserve_gib: got 1.2 GiB .*is 1.50 GiB, of which 1.00 GiB are free; lower reserve",
        ),
    ],
)
def test_what_cannot_be_is_refused(gib: float, reserve: float, limits: list[MemoryLimit], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_memory(config(gib, reserve), limits)


@pytest.mark.parametrize(
    ("gib", "limits", "warned"),
    [
        (0.79, LIMITS, None),
        (0.81, LIMITS, r"container's memory limit .*1.50 GiB, of which 1.00 GiB are free"),
        (1.5, LIMITS, "container"),
        (15.9, [MACHINE], None),
        (16.1, [MACHINE], "16.1 GiB, over 80 % .*the machine's memory is 23.00 GiB, of which 20.00"),
        (23.0, [MACHINE], "machine"),
        (1e5, [], None),
    ],
)
def test_what_is_tight_is_logged_once_and_no_error(
    gib: float, limits: list[MemoryLimit], warned: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    check_memory(config(gib), limits)
    assert len(caplog.messages) == (warned is not None)
    if warned is not None:
        assert re.search(warned, caplog.messages[0])
    assert (warning_of(config(gib), limits) is None) == (warned is None)


def test_an_engine_is_refused_before_it_takes_memory(
    platform: Platform, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = MemoryLimit("the container's memory limit (/x)", 5000, 5000, True)
    monkeypatch.setattr(lwkv.engine, "read_limits", lambda: [tiny])
    monkeypatch.setattr(lwkv.engine, "HostPool", None)
    with pytest.raises(ConfigError, match=r"max_local_cpu_size: got .*container"):
        Oracle(platform, device, dims=Dims()).engine()
