"""A cache engine whose chunks are on disk: what one engine stored the next one loads, byte for byte."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import FORMS, Dims, Oracle, require_rest, run_slots

from lwkv.engine import CacheEngine
from lwkv.platforms import Platform
from lwkv.storage import Status
from lwkv.storage.disk.reader import DiskReader

MakeEngine = Callable[[], CacheEngine]
TOKENS = list(range(40))


@pytest.fixture
def oracle(platform: Platform, device: torch.device) -> Oracle:
    return Oracle(platform, device, dims=Dims(blocks=24))


def disk_engine(oracle: Oracle, folder: Path, **settings: object) -> CacheEngine:
    return oracle.engine(8, local_disk=str(folder), max_local_disk_size=0.1, **settings)


def store(oracle: Oracle, engine: CacheEngine, slots: list[int]) -> None:
    oracle.compute(TOKENS, slots)
    engine.store(TOKENS, slot_mapping=slots)
    assert engine.flush()


def require_all_comes_back(oracle: Oracle, engine: CacheEngine) -> None:
    assert engine.lookup(TOKENS) == 40
    assert engine.retrieve(TOKENS, slot_mapping=run_slots(48, 40)).all()
    oracle.expect(TOKENS, run_slots(48, 40))
    oracle.check()
    require_rest(engine)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_the_next_engine_loads_what_is_on_disk(
    platform: Platform, device: torch.device, tmp_path: Path, form: str, dtype: torch.dtype
) -> None:
    oracle = Oracle(platform, device, form, Dims(blocks=24, head_size=8, dtype=dtype))
    with disk_engine(oracle, tmp_path) as engine:
        store(oracle, engine, run_slots(0, 40))
    with disk_engine(oracle, tmp_path) as engine:
        require_all_comes_back(oracle, engine)


def test_without_local_cpu_nothing_stays_in_host_memory(oracle: Oracle, tmp_path: Path) -> None:
    with disk_engine(oracle, tmp_path, local_cpu=False) as engine:
        for _ in range(2):
            store(oracle, engine, run_slots(0, 40))
            assert (engine.stats()["pages_in_use"], engine.stats()["chunks"]) == (0, 0)
            require_all_comes_back(oracle, engine)


def test_what_is_evicted_from_host_memory_comes_back_from_disk(oracle: Oracle, tmp_path: Path) -> None:
    with disk_engine(oracle, tmp_path, pages=15) as engine:
        store(oracle, engine, run_slots(0, 40))
        others = [1000 + token for token in TOKENS]
        oracle.compute(others, run_slots(0, 40))
        engine.store(others, slot_mapping=run_slots(0, 40))
        require_rest(engine)
        assert engine.stats()["chunks_evicted"] == 5
        assert engine.retrieve(TOKENS, slot_mapping=run_slots(48, 40)).all()
        oracle.expect(TOKENS, run_slots(48, 40))
        oracle.check()
        stats = engine.stats()
        assert (stats["disk_hits"], stats["disk_misses"], stats["host_hits"]) == (5, 0, 0)
        assert 'lwkv_tier_hits_total{job="test",tier="disk"} 5\n' in engine.metrics(job="test")


def test_written_back_chunks_are_on_disk_after_flush_and_after_close(oracle: Oracle, tmp_path: Path) -> None:
    for end in (CacheEngine.flush, CacheEngine.close):
        salts = [end.__name__]
        with disk_engine(oracle, tmp_path, write_policy="write_back") as engine:
            oracle.compute(TOKENS, run_slots(0, 40))
            engine.store(TOKENS, slot_mapping=run_slots(0, 40), salts=salts)
            end(engine)
            with disk_engine(oracle, tmp_path) as another:
                assert another.lookup(TOKENS, salts) == 40


def test_a_full_disk_costs_its_chunks_and_nothing_else(
    oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with disk_engine(oracle, tmp_path) as engine:
        with monkeypatch.context() as broken:
            broken.setattr(os, "posix_fallocate", full)
            oracle.compute(TOKENS, run_slots(0, 40))
            engine.store(TOKENS, slot_mapping=run_slots(0, 40))
            assert not engine.flush()
        require_rest(engine)
        assert engine.retrieve(TOKENS, slot_mapping=run_slots(48, 40)).all()
        oracle.expect(TOKENS, run_slots(48, 40))
        oracle.check()
        stats = engine.stats()
        assert stats["disk_errors"] == stats["disk_no_space"] >= 2
        assert (stats["disk_resting"], stats["disk_used_bytes"], stats["disk_files"]) == (1, 0, 0)
    assert "tier disk: write failed: DiskFullError: [Errno 28] No space left on device" in caplog.text


def test_a_disk_that_hangs_does_not_keep_the_engine(
    oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on = threading.Event()
    read = DiskReader.read

    def hang(reader: DiskReader, *arguments: Any) -> Status:
        going_on.wait()
        return read(reader, *arguments)

    with disk_engine(oracle, tmp_path) as engine:
        store(oracle, engine, run_slots(0, 40))
    with disk_engine(oracle, tmp_path, load_timeout_s=2.0) as engine:
        monkeypatch.setattr(DiskReader, "read", hang)
        assert engine.lookup(TOKENS) == 40
        assert not engine.retrieve(TOKENS, slot_mapping=run_slots(48, 40)).any()
        going_on.set()
        require_rest(engine)
        assert engine.retrieve(TOKENS, slot_mapping=run_slots(48, 40)).all()
        oracle.expect(TOKENS, run_slots(48, 40))
        oracle.check()


def test_an_engine_that_is_dropped_without_close_keeps_no_thread(oracle: Oracle, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    engine = disk_engine(oracle, tmp_path)
    store(oracle, engine, run_slots(0, 40))
    assert engine.lookup(TOKENS) == 40
    left = [thread for thread in threading.enumerate() if thread not in before]
    assert any("disk" in thread.name for thread in left)
    del engine
    gc.collect()
    for thread in left:
        thread.join(20)
    assert not [thread.name for thread in left if thread.is_alive()]
