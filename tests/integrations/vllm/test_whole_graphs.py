"""Steps that run as one graph of the whole model: vLLM calls no hooks around their layers."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
from integrations.vllm.scripted import CHUNK, Scripted, ScriptedRequest, expected

from lwkv.integrations.vllm.worker.forward_pass import calls_hooks

PROMPT = list(range(500, 501 + 2 * CHUNK))


class Mode(Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2


@pytest.mark.parametrize(
    ("context", "comes"),
    [
        (SimpleNamespace(attn_metadata={}, cudagraph_runtime_mode=Mode.NONE), True),
        (SimpleNamespace(attn_metadata={}, cudagraph_runtime_mode=Mode.PIECEWISE), True),
        (SimpleNamespace(attn_metadata={}), True),
        (SimpleNamespace(attn_metadata={}, cudagraph_runtime_mode=Mode.FULL), False),
        (SimpleNamespace(attn_metadata=None, cudagraph_runtime_mode=Mode.NONE), False),
        (None, False),
    ],
)
def test_hooks_come_where_attention_has_metadata_and_no_whole_graph_runs(context: Any, comes: bool) -> None:
    assert calls_hooks(context) is comes


def _cached_but_for_the_last_token(**options: Any) -> Scripted:
    """An engine that has loaded all of a prompt but its last token, and decoded 9 tokens behind it."""
    engine = Scripted(1, own_cache=False, **options)
    engine.add(ScriptedRequest("stores", PROMPT, 1))
    engine.run()
    engine.add(ScriptedRequest("loads", PROMPT, 9))
    engine.run()
    tokens = list(PROMPT)
    for token in engine.answers["loads"]:
        assert token == expected(tokens, engine.num_ranks)
        tokens.append(token)
    return engine


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_prompt_cached_but_for_its_last_token_is_loaded_once_before_the_graph(num_ranks: int) -> None:
    engine = _cached_but_for_the_last_token(whole_graphs=True, num_ranks=num_ranks)
    assert (engine.loaded, engine.failed) == (2 * CHUNK, 0)
    for rank in engine.ranks:
        stats = rank.engine.stats()
        assert stats["tokens_asked"] == stats["tokens_retrieved"] == 2 * CHUNK
    engine.at_rest()
    engine.close()


def test_what_whole_graphs_have_written_is_stored_after_them() -> None:
    engine = _cached_but_for_the_last_token(whole_graphs=True, save_decode_cache=True)
    (rank,) = engine.ranks
    engine.at_rest()
    assert rank.engine.lookup([*PROMPT, *engine.answers["loads"]]) == 3 * CHUNK
    assert rank.engine.stats().get("stores_dropped", 0) == 0
    engine.close()


def test_where_hooks_stay_out_unannounced_loaded_blocks_are_computed_again() -> None:
    engine = _cached_but_for_the_last_token(silent=1.0)
    assert engine.failed == -(-2 * CHUNK // 4)
    engine.at_rest()
    engine.close()


def test_steps_without_loads_and_stores_do_nothing_on_the_device() -> None:
    engine = _cached_but_for_the_last_token(whole_graphs=True)
    connector = engine.ranks[0].engine.connector
    before = engine.ranks[0].engine.counts()
    connector.loader.begin_load = connector.saver.begin_save = None  # type: ignore[method-assign,assignment]
    worker = engine.ranks[0].worker
    for step in range(100, 105):
        worker.begin(type(worker._orders)(step, step))
        worker.start_load(False)
        worker.end()
        assert worker.invalid_blocks() == set()
    assert engine.ranks[0].engine.counts() == before
    engine.close()
