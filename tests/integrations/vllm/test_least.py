"""What a step moves is the least that is needed: pages, copies, uploads and what is asked of tiers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from integrations.vllm.scripted import BLOCK, CHUNK, LAYERS, Scripted, ScriptedRequest, expected
from storage.faulty_tier import FaultyTier

from lwkv.keys import LayerKey

PROMPT = list(range(4 * CHUNK + 3))


class Copies:
    """Counts the pages that a rank's connector copies to and from the device."""

    def __init__(self, engine: Scripted) -> None:
        self.loaded = self.saved = 0
        connector = engine.ranks[0].engine.connector
        self._begin_load, self._begin_save = connector.loader.begin_load, connector.saver.begin_save
        connector.loader.begin_load = self._count_load  # type: ignore[method-assign]
        connector.saver.begin_save = self._count_save  # type: ignore[method-assign]

    def _count_load(self, transfer: Any, *rest: Any) -> Any:
        self.loaded += LAYERS * transfer.num_chunks
        return self._begin_load(transfer, *rest)

    def _count_save(self, transfer: Any, *rest: Any) -> Any:
        self.saved += LAYERS * transfer.num_chunks
        return self._begin_save(transfer, *rest)


def engine_on(tier: FaultyTier, **settings: Any) -> Scripted:
    """An engine without blocks of its own, as a process has that has just begun."""
    return Scripted(0, own_cache=False, budget=64, host_chunks=16, lower=[tier], **settings)


def ask(engine: Scripted, name: str, tokens: Sequence[int] = PROMPT, max_tokens: int = 2) -> None:
    """Have an answer, which must be right, and wait until all tiers have what was stored."""
    engine.add(ScriptedRequest(name, list(tokens), max_tokens))
    engine.run()
    assert engine.answers[name][0] == expected(tokens, engine.num_ranks)
    assert engine.ranks[0].engine.flush()


def filled(tokens: Sequence[int] = PROMPT) -> FaultyTier:
    """A tier that has all chunks of a prompt, and has forgotten what it was asked."""
    tier = FaultyTier()
    engine = engine_on(tier)
    ask(engine, "cold", tokens)
    pages = dict(tier.pages)
    engine.close()
    tier = FaultyTier()
    tier.pages = pages
    return tier


def written(tier: FaultyTier) -> list[LayerKey]:
    return [key for keys in tier.calls_of("put") for key in keys]


@pytest.mark.parametrize("local_cpu", [True, False])
@pytest.mark.parametrize("layerwise", [True, False])
def test_what_was_loaded_from_a_lower_tier_is_neither_saved_nor_uploaded_again(
    local_cpu: bool, layerwise: bool, tmp_path: Path
) -> None:
    tier = filled()
    disk = {"local_disk": str(tmp_path), "max_local_disk_size": 0.1}
    engine = engine_on(tier, local_cpu=local_cpu, use_layerwise=layerwise, **disk)
    copies = Copies(engine)
    for name in ("warm", "again"):
        ask(engine, name)
    assert engine.loaded == 2 * 4 * CHUNK
    assert (copies.saved, written(tier)) == (0, [])
    assert "disk_put_calls" not in engine.ranks[0].engine.stats()
    engine.at_rest()
    engine.close()


def test_a_prompt_that_ends_with_a_chunk_is_cached_wholly_and_its_last_chunk_not_stored_again() -> None:
    tokens = PROMPT[: 3 * CHUNK]
    tier = filled(tokens)
    engine = engine_on(tier)
    copies = Copies(engine)
    ask(engine, "warm", tokens)
    assert engine.loaded == 3 * CHUNK - BLOCK, "one token is computed"
    assert (copies.saved, written(tier)) == (0, [])
    engine.close()


@pytest.mark.parametrize("gone", [[0], [2], [0, 2], [1, 2]])
def test_only_chunks_that_no_tier_has_are_stored(gone: list[int]) -> None:
    tier = filled()
    engine = engine_on(tier)
    keys = engine.ranks[0].engine.keys(PROMPT)
    for chunk in gone:
        for layer in range(LAYERS):
            del tier.pages[LayerKey(keys[chunk], layer)]
    copies = Copies(engine)
    ask(engine, "warm")
    assert engine.loaded == gone[0] * CHUNK
    assert {key.chunk for key in written(tier)} == {keys[chunk] for chunk in gone}
    assert copies.saved == len(gone) * LAYERS
    engine.close()


def test_an_engine_that_only_stores_uploads_what_the_tier_lacks() -> None:
    tier = filled()
    engine = engine_on(tier, loads=False)
    ask(engine, "warm")
    assert (engine.loaded, written(tier)) == (0, [])
    ask(engine, "longer", [*PROMPT, *range(500, 510)])
    assert engine.loaded == 0
    assert len(written(tier)) == LAYERS, "the one chunk that is new"
    engine.close()


def test_chunks_that_could_not_be_loaded_are_stored_and_uploaded_anew() -> None:
    tier = filled()
    engine = engine_on(tier)
    for key, page in tier.pages.items():
        if key.layer == 1:
            tier.pages = tier.pages | {key: page[:0]}  # cannot be copied
    ask(engine, "fails")
    assert engine.failed > 0
    assert len(written(tier)) == 4 * LAYERS
    engine.loaded = engine.failed = 0
    ask(engine, "warm")
    assert (engine.loaded, engine.failed) == (4 * CHUNK, 0)
    engine.close()


def own_beginning(engine: Scripted, num_tokens: int) -> None:
    """Have the engine keep the first tokens of the prompt in its own blocks, and no others."""
    engine.own_cache = True
    known = engine.blocks.known
    engine.blocks.known = {tokens: block for tokens, block in known.items() if len(tokens) <= num_tokens}


def engine_that_has(num_tokens: int, **settings: Any) -> Scripted:
    """An engine that cached PROMPT in host memory, and has its first tokens in blocks."""
    engine = Scripted(0, budget=64, host_chunks=16, **settings)
    ask(engine, "cold")
    own_beginning(engine, num_tokens)
    return engine


def answer_to(engine: Scripted, request: ScriptedRequest) -> int:
    """What the scheduler promises, asked again as long as it is still looking."""
    while (hit := engine.scheduler.num_new_matched_tokens(request, BLOCK)) is None:
        time.sleep(0.001)
    return hit


def test_the_tiers_that_cached_tokens_come_from_are_known() -> None:
    tier = filled()
    engine = engine_on(tier)
    request = ScriptedRequest("lower", PROMPT, 1)
    hit = answer_to(engine, request)
    assert engine.scheduler.hit_sources(request, hit) == {"faulty": 4 * CHUNK - BLOCK}
    ask(engine, "warm", PROMPT[: 2 * CHUNK + 1])
    engine.add(ScriptedRequest("elsewhere", [1, 2, 3], 1))
    engine.run()  # the scheduler hears of it
    hit = answer_to(engine, request)
    assert engine.scheduler.hit_sources(request, hit) == {"host": 2 * CHUNK - BLOCK, "faulty": 2 * CHUNK}
    assert engine.scheduler.hit_sources(ScriptedRequest("unknown", PROMPT, 1), hit) == {}
    engine.close()


@pytest.mark.parametrize("own", [0, 1, 2, 3, 5, 7])
def test_only_chunks_with_a_token_that_the_engine_lacks_are_loaded(own: int) -> None:
    engine = engine_that_has(own * BLOCK)
    copies = Copies(engine)
    ask(engine, "warm")
    assert engine.loaded == 4 * CHUNK - own * BLOCK
    assert copies.loaded == LAYERS * (4 - own * BLOCK // CHUNK)
    stats = engine.ranks[0].engine.stats()
    assert stats["tokens_asked"] == stats["tokens_retrieved"] == engine.loaded
    engine.close()


def engine_on_lower_tier_that_has(num_tokens: int, tier: FaultyTier) -> Scripted:
    """An engine that has the first tokens of PROMPT in blocks, and no chunk in host memory."""
    engine = engine_on(tier)
    engine.own_cache = True
    ask(engine, "first", PROMPT[: num_tokens + 1], 1)
    host = engine.ranks[0].engine.parts().storage.host
    assert host.evict(host.evictable())
    ask(engine, "elsewhere", [1, 2, 3], 1)  # the scheduler hears of it
    engine.loaded = 0
    tier.calls.clear()
    return engine


def read(tier: FaultyTier) -> list[LayerKey]:
    return [key for keys in tier.calls_of("get") for key in keys]


def test_only_chunks_with_a_token_that_the_engine_lacks_are_read_from_a_lower_tier() -> None:
    tier = filled()
    engine = engine_on_lower_tier_that_has(3 * CHUNK, tier)
    ask(engine, "warm")
    assert engine.loaded == CHUNK
    assert {key.chunk for key in read(tier)} == {engine.ranks[0].engine.keys(PROMPT)[3]}
    assert len(read(tier)) == LAYERS
    engine.close()


def test_what_lies_behind_a_chunk_that_only_the_engine_has_is_loaded() -> None:
    tier = filled()
    engine = engine_on_lower_tier_that_has(CHUNK, tier)
    first, *others = engine.ranks[0].engine.keys(PROMPT)
    for layer in range(LAYERS):
        del tier.pages[LayerKey(first, layer)]
    copies = Copies(engine)
    ask(engine, "warm")
    assert (engine.loaded, engine.failed) == (3 * CHUNK, 0)
    assert {key.chunk for key in read(tier)} == set(others)
    assert copies.loaded == len(read(tier)) == 3 * LAYERS
    assert copies.saved == LAYERS, "the first chunk is stored again, out of the engine's blocks"
    engine.close()


def evict(engine: Scripted, *chunks: int) -> None:
    """Have host memory lose these chunks of PROMPT."""
    host = engine.ranks[0].engine.parts().storage.host
    keys = engine.ranks[0].engine.keys(PROMPT)
    for chunk in reversed(chunks):
        host._order.evict_first(keys[chunk])
    assert host.evict(len(chunks) * LAYERS)


@pytest.mark.parametrize("has_lower", [True, False])
def test_a_chunk_that_was_found_and_goes_before_it_is_computed_anew_is_stored_again(has_lower: bool) -> None:
    tier = FaultyTier()
    engine = Scripted(0, own_cache=False, budget=CHUNK, host_chunks=16, lower=[tier] if has_lower else [])
    ask(engine, "cold")
    evict(engine, 1)  # what is behind it is found, and not loaded
    tier.pages = {}
    ask(engine, "elsewhere", [1, 2, 3], 1)  # the scheduler hears of it
    request = ScriptedRequest("warm", PROMPT, 2)
    engine.add(request)
    while request not in engine.running:
        engine.step()
    evict(engine, 2, 3)
    copies = Copies(engine)
    engine.run()
    assert engine.ranks[0].engine.flush()
    keys = engine.ranks[0].engine.keys(PROMPT)
    host = engine.ranks[0].engine.parts().storage.host
    assert host.contains(keys) == [True] * 4
    assert copies.saved <= 3 * LAYERS
    engine.close()


def test_what_was_found_and_is_still_there_is_not_stored_again_though_it_was_computed() -> None:
    engine = Scripted(0, own_cache=False, budget=CHUNK, host_chunks=16)
    ask(engine, "cold")
    evict(engine, 1)
    ask(engine, "elsewhere", [1, 2, 3], 1)
    copies = Copies(engine)
    ask(engine, "warm")
    assert copies.saved == LAYERS
    engine.close()
