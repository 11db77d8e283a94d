"""Nothing that a step, a lookup or a metric does touches a file system on its own thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.vllm.scripted import Scripted, ScriptedRequest
from oracle import Dims, Oracle, run_slots
from storage.servers import wait_until
from storage.standing_still import StandingStill

from lwkv.engine import CacheEngine, Request
from lwkv.errors import ErrorsTo
from lwkv.integrations.vllm.scheduler.lookup import tier_lookup
from lwkv.integrations.vllm.scheduler.lookup.tier_lookup import open_lower_tiers
from lwkv.platforms import Platform
from lwkv.steps import LayerSteps
from lwkv.storage.disk.lock import LOCK_NAME

TOKENS = list(range(40))
OTHERS = list(range(100, 140))
TIMEOUT_S = 0.5
WATCHDOG_S = 60.0


@pytest.fixture
def oracle(platform: Platform, device: torch.device) -> Oracle:
    return Oracle(platform, device, dims=Dims(blocks=24))


@pytest.fixture
def file_system(monkeypatch: pytest.MonkeyPatch) -> StandingStill:
    return StandingStill(monkeypatch)


@pytest.fixture
def engine(oracle: Oracle, tmp_path: Path, file_system: StandingStill) -> Iterator[CacheEngine]:
    """One that has nothing in host memory; five chunks of TOKENS are on the disk."""
    settings = {"local_disk": str(tmp_path), "max_local_disk_size": 0.1, "load_timeout_s": TIMEOUT_S}
    with oracle.engine(8, **settings | {"load_timeout_s": 10.0}) as first:
        oracle.compute(TOKENS, run_slots(0, 40))
        first.store(TOKENS, slot_mapping=run_slots(0, 40))
        assert first.flush()
    with oracle.engine(8, **settings) as second:
        # The timeout is short: on a busy machine the disk may answer later than that.
        wait_until(lambda: second.stats().get("disk_files") == 5, "the disk's numbers to be known")
        yield second


def watched(work: Callable[[], object], file_system: StandingStill) -> None:
    """Do `work` on a thread of its own while the file system stands still; it must end, and not touch it."""
    errors: list[BaseException] = []

    def run() -> None:
        with ErrorsTo(errors.append):
            work()

    thread = threading.Thread(target=run, daemon=True)
    with file_system.still():
        thread.start()
        thread.join(WATCHDOG_S)
        assert not thread.is_alive(), "it waits for the file system"
        # The tier is called in the background, maybe later than what asked for it.
        wait_until(lambda: bool(file_system.callers), "the tier to be called")
    assert thread not in file_system.callers
    if errors:
        raise errors[0]


def drive(steps: LayerSteps, loads: list[Request], stores: list[Request]) -> Any:
    steps.begin(loads, stores)
    steps.look_up()
    steps.start_load_kv()
    for layer in range(3):
        steps.wait_for_layer_load(layer)
        steps.save_kv_layer(layer)
    return steps.wait_for_save()


def test_metrics_tell_what_was_known_last(engine: CacheEngine, file_system: StandingStill) -> None:
    before = engine.stats()
    assert before["disk_files"] == 5

    def look() -> None:
        for _ in range(3):
            stats = engine.stats()
            assert stats == before
            assert f'lwkv_tier_used_bytes{{tier="disk"}} {before["disk_used_bytes"]}' in engine.metrics()

    watched(look, file_system)


def test_every_call_of_the_engine_goes_on(
    engine: CacheEngine, oracle: Oracle, file_system: StandingStill
) -> None:
    def use() -> None:
        assert engine.lookup(TOKENS) in (0, 40)
        assert not engine.retrieve(TOKENS, slot_mapping=run_slots(48, 40)).any()
        engine.store(OTHERS, slot_mapping=run_slots(0, 40))
        result = drive(
            LayerSteps(engine),
            [Request(TOKENS, torch.tensor(run_slots(48, 40)))],
            [Request(list(range(200, 240)), torch.tensor(run_slots(0, 40)))],
        )
        assert not result.loaded[0].any()
        assert not engine.flush(0.1)
        assert engine.lookup(OTHERS) == 40
        assert engine.retrieve(OTHERS, slot_mapping=run_slots(48, 40)).all()
        assert engine.stats()["disk_resting"] == 1
        engine.freeze()
        engine.metrics(model="m")
        engine.close(TIMEOUT_S)
        engine.stats()

    oracle.compute(OTHERS, run_slots(0, 40))
    watched(use, file_system)
    engine.close()


def test_both_halves_of_the_connector_go_on(
    tmp_path: Path, file_system: StandingStill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_lookup, "ANSWER_S", TIMEOUT_S)
    rig = Scripted(7, local_disk=str(tmp_path), max_local_disk_size=0.1, load_timeout_s=TIMEOUT_S)
    [rank] = rig.ranks
    below = open_lower_tiers(rank.engine.config, rank.worker.info)
    rig.scheduler.index._ranks[0].below = below
    rig.add(ScriptedRequest("before", list(range(30)), 3))
    rig.run()
    rank.engine.flush()  # a busy machine's disk may be late, and be skipped: what it has does not matter here

    def serve() -> None:
        for number in range(4):
            rig.add(ScriptedRequest(f"known-{number}", list(range(30)), 2))
            rig.add(ScriptedRequest(f"new-{number}", list(range(50 * number, 50 * number + 30)), 2))
            while rig.running or rig.waiting or rig.in_flight:
                rig.step()
                rank.worker.new_counts()
                time.sleep(0.001)  # as vLLM does in a step that has nothing to run
        rig.scheduler.close()
        rank.engine.close(TIMEOUT_S)

    watched(serve, file_system)
    rig.close()


@pytest.mark.parametrize("thing", ["fifo", "folder", "link"])
def test_another_thing_in_the_locks_place_keeps_nobody(
    oracle: Oracle, tmp_path: Path, thing: str, engine: CacheEngine
) -> None:
    lock = tmp_path / LOCK_NAME
    lock.unlink()
    {
        "fifo": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
        "link": lambda: lock.symlink_to(tmp_path / "nothing"),
    }[thing]()
    done = threading.Event()

    def use() -> None:
        engine.stats()
        engine.store(OTHERS, slot_mapping=run_slots(0, 40))
        engine.flush(5.0)
        engine.metrics()
        done.set()

    oracle.compute(OTHERS, run_slots(0, 40))
    threading.Thread(target=use, daemon=True).start()
    assert done.wait(WATCHDOG_S)
    assert engine.stats()["disk_files"] == 5
