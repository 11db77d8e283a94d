"""Lower tiers that freeze, hang and are killed under a real SGLang: fewer hits, and every answer right."""

from __future__ import annotations

import time
from pathlib import Path

from integrations.in_sglang.hanging_tier import installed_in
from integrations.in_sglang.prompts import BATCHES, DOCUMENTS
from integrations.in_sglang.rig import Engine, started, with_lwkv
from integrations.in_sglang.test_engines import Expected, eventually, require_right
from storage.servers import any_server_program, redis_server, running

# Host memory has room for one of the documents and a part of another one.
SMALL = {"max_local_cpu_size": 0.0007, "load_timeout_s": 2}
LONGEST_S = 60.0
"""A tier is given up after seconds; answers take their own time on a busy machine."""


def ask_all(engine: Engine, batches: list[list[list[int]]], expected: Expected) -> int:
    """Ask batch by batch, require the answers, and count what came from host memory."""
    from_host = 0
    for batch in batches:
        begin = time.monotonic()
        answers = engine.ask(batch)
        assert time.monotonic() - begin < LONGEST_S
        require_right(answers, batch, expected)
        from_host += sum(answer.from_host for answer in answers)
    return from_host


def test_a_server_that_freezes_and_is_killed_costs_hits_and_no_request(
    llama: Path, expected: Expected, tmp_path: Path
) -> None:
    server = redis_server(any_server_program(), tmp_path / "server")
    with running(server):
        url = f"redis://127.0.0.1:{server.port}?timeout_s=0.5&connect_timeout_s=0.5"
        with started(llama, **with_lwkv(remote_url=url, **SMALL)) as engine:
            ask_all(engine, DOCUMENTS, expected)
            engine.flush()
            # The first document is in the server alone: brought up while, or after, it is asked for.
            assert eventually(lambda: loads(engine, DOCUMENTS[0], expected))
            server.freeze()
            engine.flush()
            ask_all(engine, [*DOCUMENTS, *BATCHES[:4]], expected)
            server.thaw()
            server.kill()
            engine.flush()
            ask_all(engine, [*DOCUMENTS, *BATCHES[4:8]], expected)
            assert "External linker load failed" not in engine.log
            server.start()


def test_a_tier_whose_reads_never_end_costs_nothing_but_its_hits(
    llama: Path, expected: Expected, tmp_path: Path
) -> None:
    hangs = tmp_path / "hangs"
    hangs.touch()
    url = f"hanging://{hangs}"
    with started(llama, path=[installed_in(tmp_path)], **with_lwkv(remote_url=url, **SMALL)) as engine:
        ask_all(engine, [*DOCUMENTS, *BATCHES[:4]], expected)
        engine.flush()
        ask_all(engine, [*DOCUMENTS, *BATCHES[:4]], expected)
        hangs.unlink()
        ask_all(engine, DOCUMENTS, expected)
        assert "External linker load failed" not in engine.log


def loads(engine: Engine, batch: list[list[int]], expected: Expected) -> bool:
    """Whether a prompt comes from host memory after a flush of the device."""
    engine.flush()
    return ask_all(engine, [batch], expected) > 0
