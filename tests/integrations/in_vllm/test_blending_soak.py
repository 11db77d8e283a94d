"""A long random run of blends with few blocks, little memory and tiers that fail: all right, nothing left."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integrations.in_vllm.faulty_disk import FaultyDisk
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import BLOCK, Engine, assert_same, prompt, started
from integrations.in_vllm.test_blending import Documents, ask, blending, compute_again, count, settle
from integrations.in_vllm.trouble import Trouble
from storage.servers import Server, redis_server, running, valkey_program

TURNS = 90
"""With two to six requests each: 300 and more. `--soak MINUTES` asks as many turns in half a minute."""
LAST = 10
"""Turns at the end without lower tiers."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    room = ("--maxmemory", "24mb", "--maxmemory-policy", "volatile-ttl")
    server = redis_server(valkey_program(), tmp_path / "server", *room)
    with running(server):
        yield server


def test_random_requests_with_few_blocks_equal_an_engine_without_lwkv(
    llama: Path,
    plain: Elsewhere,
    tmp_path: Path,
    server: Server,
    minutes: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that are blended too, where all of their tokens are computed again.

    Requests are preempted, since a batch needs more blocks than there are; chunks are evicted, also without
    the scheduler's knowledge; requests are aborted; a step has room for parts of prompts only; tiers are
    frozen, emptied and killed, at last for good.
    """
    folder = tmp_path / "disk"
    settings = blending(
        max_local_cpu_size=0.02,
        local_disk=str(folder),
        max_local_disk_size=0.1,
        remote_url=f"valkey://127.0.0.1:{server.port}",
        load_timeout_s=2,
    )
    settings |= {"max_num_batched_tokens": 256, "num_gpu_blocks_override": 1200 // BLOCK, "max_num_seqs": 8}
    drawn = random.Random(16)
    known = [prompt(900 + number, drawn.randrange(20, 150)) for number in range(8)]
    heads = [prompt(950 + number, drawn.randrange(4, 120)) for number in range(3)]
    asked_for, turns = 0, max(TURNS, round(2 * minutes * TURNS))
    disk = FaultyDisk(folder, monkeypatch)
    faults = {
        "server killed": (server.kill, server.start),
        "server frozen": (server.freeze, server.thaw),
        "disk frozen": (disk.freeze, disk.thaw),
        "disk emptied": (disk.lose_all, disk.thaw),
    }
    trouble = Trouble(faults, 17, quiet_s=(0.5, 6), lasting_s=(0.1, 4))
    with started(llama, enable_prefix_caching=True, max_model_len=1024, **settings) as engine, trouble:
        in_parts = count_waiting(engine, monkeypatch)
        for turn in range(turns):
            if turn == turns - LAST:
                trouble.__exit__()
                server.kill()
                disk.remove()
            share = drawn.choice([0.0, 0.3, 1.0, 1.0])
            compute_again(engine, share)
            asked = []
            for number in range(drawn.randrange(2, 7)):
                parts = drawn.sample(known, drawn.randrange(1, 4))
                question = prompt(turn * 10 + number, drawn.randrange(1, 60))
                one = Documents(parts, question, drawn.choice(heads))
                if drawn.random() < 0.4:
                    one.segments = []
                asked.append(one)
            if drawn.random() < 0.1:
                engine.forget()
            if drawn.random() < 0.2:
                host = engine.worker.engine.parts().storage.host
                engine.flush()  # as far as it comes
                host.evict(host.evictable())
            if drawn.random() < 0.1:
                extra = {"kv_transfer_params": {"lwkv_segments": asked[0].segments}}
                engine.abort(asked[0].ids, 1, extra)
            max_tokens = drawn.choice([1, 8, 40])
            answers = ask(engine, asked, max_tokens)
            asked_for += len(asked)
            exact = [n for n, one in enumerate(asked) if share == 1.0 or not one.segments]
            wanted = plain.ask([asked[n].ids for n in exact], max_tokens)
            assert_same([answers[n] for n in exact], wanted)
        assert not engine.flush(), "the tiers have not got what was stored"
        settle(engine)
        engine.at_rest()
        assert len(engine.scheduler.blending) == 0
        assert count(engine, "requests") > 20
        assert len(in_parts) > turns / 10, "blends in parts, while others are preempted"
        assert engine.metric("vllm:num_preemptions") > 0
        assert not engine.scheduler.waiting._loads
        found = {tier: engine.worker.engine.stats().get(f"{tier}_hits", 0) for tier in ("disk", "valkey")}
        print(f"\n{asked_for} requests, {trouble.done}, {found}, {engine.worker.engine.stats()}")
        assert found["disk"], "nothing was brought from below host memory"
    assert asked_for >= 300


def count_waiting(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests whose blends end, from now on, while they wait: they are done in parts."""
    worker, ended = engine.worker._blending, list[str]()
    note_end = worker._note_end

    def noted(order: Any) -> None:
        ended.append(order.waiting)
        note_end(order)

    monkeypatch.setattr(worker, "_note_end", noted)
    return ended
