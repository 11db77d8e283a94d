"""Documents below host memory are brought from there while their prompt waits, or are computed in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from integrations.in_vllm.faulty_disk import FaultyDisk
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import BLOCK, CHUNK, Engine, assert_same, prompt, started
from integrations.in_vllm.test_blending import (
    Documents,
    ask,
    blending,
    blends_at_rest,
    compute_again,
    count,
    documents,
    encode,
    settle,
)

TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def shared(llama: Path, folder: Path) -> Iterator[Engine]:
    settings = blending(blend_recompute_ratios=1.0, local_disk=str(folder), max_local_disk_size=0.25)
    settings["kv_transfer_config"]["kv_connector_extra_config"]["load_timeout_s"] = TIMEOUT_S
    with started(llama, enable_prefix_caching=True, max_num_batched_tokens=1024, **settings) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    compute_again(shared, 1.0)
    yield shared
    blends_at_rest(shared)
    assert not shared.scheduler.waiting._loads


@pytest.fixture
def disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyDisk]:
    disk = FaultyDisk(folder, monkeypatch)
    yield disk
    disk.thaw()


class Moved:
    """What an engine has counted since."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine.worker.engine
        self._before = self._engine.stats()

    def since(self, *names: str) -> list[int]:
        now = self._engine.stats()
        return [now.get(name, 0) - self._before.get(name, 0) for name in names]


def only_on_disk(engine: Engine, parts: list[list[int]]) -> None:
    encode(engine, parts)
    engine.evict_all()
    engine.ask([prompt(97, 5)], 1)  # the scheduler hears of it


@pytest.mark.parametrize("number", [1, 3], ids=["alone", "together"])
def test_documents_on_disk_are_blended_and_not_encoded_again(
    engine: Engine, plain: Elsewhere, number: int
) -> None:
    parts = documents(200 + number, 100, 150, 77)
    only_on_disk(engine, parts)
    asked = [Documents(parts[::-1], prompt(210 + each, 33)) for each in range(number)]
    reused, encoded = count(engine, "tokens_reused"), count(engine, "segments_encoded")
    assert_same(ask(engine, asked), plain.ask([one.ids for one in asked]))
    assert count(engine, "tokens_reused") - reused > number * (327 - BLOCK)
    assert count(engine, "segments_encoded") == encoded


def test_no_more_is_moved_computed_or_stored_than_is_needed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = engine.worker._blending._layers
    run, rows = layers.run, list[int]()

    def counted(layer: int, calls: Any, states: Any) -> Any:
        rows.append(len(states.hidden))
        return run(layer, calls, states)

    monkeypatch.setattr(layers, "run", counted)
    parts = documents(270, 100, 150, 77)
    chunk_bytes = engine.worker.engine.num_layers * engine.worker.engine.connector.page_bytes
    moved = Moved(engine)
    encode(engine, parts)
    # Each document once, and the prompt's five full chunks.
    assert moved.since("tokens_stored", "disk_put_bytes") == [327 + 5 * CHUNK, 12 * chunk_bytes]
    rows.clear()

    compute_again(engine, 0.3)
    moved = Moved(engine)
    ask(engine, [Documents(parts[::-1], prompt(271, 33))])
    settle(engine)
    assert moved.since("tokens_stored", "disk_put_bytes", "disk_get_bytes", "blend_tokens_encoded") == [0] * 4
    names = ("blend_tokens_reused", "blend_tokens_chosen", "blend_tokens_computed", "tokens_retrieved")
    reused, chosen, always, retrieved = moved.since(*names)
    # The head, the two gaps, and the documents up to the last block that the last one fills.
    assert (always, reused, retrieved) == (3 + 2, 320 - 5, 320 - 5)
    assert rows == [320, *3 * [always + chosen]]
    assert round(0.3 * reused) <= chosen < 0.5 * reused, "single rows between chosen ones come with them"

    engine.evict_all()
    engine.ask([prompt(97, 5)], 1)
    moved = Moved(engine)
    for number in range(2):
        ask(engine, [Documents(parts[::-1], prompt(272 + number, 33))])
    settle(engine)
    assert moved.since("disk_get_bytes", "disk_put_bytes", "tokens_stored") == [7 * chunk_bytes, 0, 0]


def test_a_disk_that_hangs_delays_a_prompt_by_the_deadline_and_no_other_one(
    engine: Engine, plain: Elsewhere, disk: FaultyDisk
) -> None:
    parts = documents(220, 100, 150)
    only_on_disk(engine, parts)
    asked = Documents(parts[::-1], prompt(221, 33))
    beside = Documents([], prompt(222, 50), [])
    wanted = plain.ask([asked.ids, beside.ids])
    compute_again(engine, 0.0)
    disk.freeze()
    begin = time.monotonic()
    assert_same(ask(engine, [asked, beside]), wanted)
    # Looking up may take half a second, and the deadline comes once; it takes far longer than a prefill.
    assert time.monotonic() - begin < 10 * TIMEOUT_S
    assert disk.waited
    disk.thaw()


def before_documents_are_fetched(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]
) -> None:
    """Have something happen when a look-up has found documents, and before they are fetched."""
    begin = engine.scheduler.waiting.begin_all

    def act_then(*arguments: object) -> None:
        act()
        begin(*arguments)

    monkeypatch.setattr(engine.scheduler.waiting, "begin_all", act_then)


def test_a_disk_that_freezes_while_it_brings_documents_makes_them_missing(
    engine: Engine, plain: Elsewhere, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has answered the look-up; what a client waits for is computed."""
    parts = documents(230, 100, 150)
    only_on_disk(engine, parts)
    asked = Documents(parts[::-1], prompt(231, 33))
    wanted = plain.ask([asked.ids])
    compute_again(engine, 0.0)
    before_documents_are_fetched(engine, monkeypatch, disk.freeze)
    before = engine.metric("vllm:lwkv_prefetches_given_up")
    assert_same(ask(engine, [asked]), wanted)
    disk.thaw()
    settle(engine)
    assert engine.metric("vllm:lwkv_prefetches_given_up") > before


def test_files_that_go_while_a_prompt_waits_for_them_make_it_computed(
    engine: Engine, plain: Elsewhere, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = documents(240, 100, 150)
    only_on_disk(engine, parts)
    asked = Documents(parts[::-1], prompt(241, 33))
    wanted = plain.ask([asked.ids])
    compute_again(engine, 0.0)
    before_documents_are_fetched(engine, monkeypatch, disk.lose_all)
    assert_same(ask(engine, [asked]), wanted)


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing(engine: Engine, disk: FaultyDisk) -> None:
    parts = documents(250, 100, 150)
    only_on_disk(engine, parts)
    asked = Documents(parts[::-1], prompt(251, 33))
    disk.freeze()
    for steps in (1, 5):
        engine.abort(asked.ids, steps, {"kv_transfer_params": {"lwkv_segments": asked.segments}})
    disk.thaw()
