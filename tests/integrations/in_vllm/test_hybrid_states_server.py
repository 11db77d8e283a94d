"""Models with states, and a server below host memory that is killed and frozen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import Engine, assert_same, prompt, started, with_lwkv
from integrations.in_vllm.test_hybrid_tiers import at_rest, empty
from storage.servers import Server, redis_server, running, valkey_program, wait_until

from lwkv.integrations.vllm.hybrid.refusals import can_have_groups

pytestmark = pytest.mark.skipif(
    not can_have_groups(vllm.__version__), reason="before 0.32, vLLM cannot load states"
)

PROMPTS = [prompt(3700, 300), prompt(3701, 200)]
HITS = 288 + 192


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = redis_server(valkey_program(), tmp_path / "server")
    with running(server):
        yield server


def test_a_server_that_freezes_and_dies_costs_hits_alone_and_is_used_again(
    lfm2: Path, server: Server
) -> None:
    computed = Elsewhere(lfm2, enable_prefix_caching=False)
    settings = with_lwkv(remote_url=f"valkey://127.0.0.1:{server.port}", load_timeout_s=2.0)
    try:
        wanted = computed.ask(PROMPTS)
        with started(lfm2, enable_prefix_caching=True, **settings) as engine:
            for hits in (0, HITS):
                assert_same(engine.ask(PROMPTS), wanted)
                assert engine.new_hits() == hits
                empty(engine)
            for begins, ends in ((server.freeze, server.thaw), (server.kill, server.start)):
                begins()
                assert_same(engine.ask(PROMPTS), wanted)
                assert engine.new_hits() == 0
                engine.forget()
                assert_same(engine.ask(PROMPTS), wanted)  # what was computed meanwhile is in host memory
                assert engine.new_hits() == HITS
                ends()
                empty(engine)
            assert_found_again(engine, computed)
            at_rest(engine)
    finally:
        computed.close()


def assert_found_again(engine: Engine, computed: Elsewhere) -> None:
    """Prompts are stored in the server and loaded from it, when its calls are tried again."""
    found = Counter[int]()

    def is_found() -> bool:
        ids = [prompt(3710 + found.total(), 100)]
        engine.ask(ids)
        empty(engine)
        assert_same(engine.ask(ids), computed.ask(ids))
        found[engine.new_hits()] += 1
        return found[96] > 0

    wait_until(is_found, "hits in a server that has come back", 120.0)
