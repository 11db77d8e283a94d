from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from oracle import require_rest
from shared_host.owners import owner_at
from shared_host.workers import wait_for

from lwkv.benchmarks.measuring.measured_engine import MeasuredEngine
from lwkv.benchmarks.measuring.scheduled_loads import ScheduledLoads
from lwkv.benchmarks.measuring.shapes import TINY
from lwkv.platforms.cpu import CPU
from lwkv.shared_host.client.connection import Connection
from lwkv.shared_host.protocol import Op

TOKENS = 4 * TINY.chunk_size
PAGE = TINY.chunk_size * TINY.token_bytes


@pytest.fixture
def ending() -> Iterator[ExitStack]:
    with ExitStack() as ending:
        yield ending


@pytest.mark.parametrize("where", ["own", "node"])
def test_all_is_loaded_and_what_is_promised_without_a_request(
    where: str, ending: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket, settings = "", {}
    if where == "node":
        socket = str(tmp_path / "host.sock")
        owner = ending.enter_context(owner_at(Path(socket), 8 * 8, stride=PAGE))
        ending.callback(lambda: wait_for(lambda: owner.server.status()["pages_held"] == 0))
        settings = {"host_memory": socket, "extra_config": {"host_memory_timeout_s": 30.0}}
    device = torch.device("cpu")
    measured = ending.enter_context(MeasuredEngine(CPU(), device, TINY, TOKENS, config=settings))
    measured.fill()
    tokens = measured.new_prompt()
    measured.keep(tokens)
    loads, asked = ScheduledLoads(measured, tokens, socket), list[object]()
    real = Connection._ask
    for _ in range(3):
        loads.prepare()
        assert not measured.places_agree()
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "_ask", lambda *a: (asked.append(a[1]), real(*a))[1])
            loads.load()
        assert measured.places_agree()
    measured.flush()
    require_rest(measured.engine)
    loads.close()
    assert not {*asked} - {Op.HAS}, "that one asks for news, on a thread of its own"
    assert len(loads.promise_ms) == (3 if where == "node" else 0)
