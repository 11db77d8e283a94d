"""Nothing that touches the same memory is left without an order: no wait is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Dims, MemoryTier, held_completions, require_rest, run_slots
from races import Races, WatchedCoder, WatchedKernels, WatchedOracle

from lwkv.codecs import choice
from lwkv.connectors import Rope, paged
from lwkv.engine import CacheEngine
from lwkv.storage import Status
from lwkv.transfer import Transfer

HOST = torch.device("cpu")
CHUNK = 8
LAYERS = 4
SETTINGS: dict[str, Any] = {}
DIMS: dict[str, Any] = {}
MOST_CHUNKS = 6
ONE, TWO, THREE = (list(range(first, first + 24)) for first in (100, 200, 300))
HERE, THERE = run_slots(3, 24), run_slots(40, 24, backwards=True)


class Traffic:
    """An engine, a model on a stream of its own, and everything they do one behind the other."""

    def __init__(self, races: Races, buffered: bool, lookahead: int, sync: bool, tier: MemoryTier) -> None:
        self.oracle = WatchedOracle(races, HOST, dims=Dims(layers=LAYERS, blocks=20, **DIMS))
        self.sync = sync
        self.engine: CacheEngine = self.oracle.engine(
            CHUNK,
            pages=MOST_CHUNKS * LAYERS,
            tiers=[tier],
            lookahead=lookahead,
            staging_buffers=3,
            enable_blending=buffered,
            **SETTINGS,
        )

    @property
    def connector(self) -> Any:
        return self.engine.connector

    def save(self, tokens: list[int], slots: list[int]) -> None:
        steps = self.engine.store_layer(tokens, slot_mapping=slots)
        for layer in range(LAYERS):
            self.oracle.compute(tokens, slots, [layer])
            next(steps)
        next(steps)

    def load(self, tokens: list[int], slots: list[int]) -> None:
        steps = self.engine.retrieve_layer(tokens, slot_mapping=slots, sync=self.sync)
        next(steps), next(steps)
        for layer in range(LAYERS):
            mask = next(steps)
            if self.sync:
                self.oracle.read(tokens, slots, layer)
        assert mask.all()
        steps.close()
        self.oracle.expect(tokens, slots)
        self.oracle.read(tokens, slots, LAYERS - 1)

    def loader(self, in_place: bool) -> Any:
        return self.connector.in_place if in_place else self.connector.loader

    def load_turned(self, tokens: list[int], slots: list[int], in_place: bool, behind: Any = None) -> None:
        """Through the buffer or past it, with every key moved to another position."""
        hold = self.engine._storage.hold(self.engine._prompt_keys.keys(np.array(tokens), ()))
        moved, shift = Transfer(np.full(3, CHUNK), np.array(slots)), np.repeat([5, 0, -9], CHUNK)
        loader, more = self.loader(in_place), {} if behind is None else {"behind": behind}
        load = loader.begin_load(moved, shift=shift, **more)
        for layer in range(LAYERS):
            loader.load_layer(load, layer, hold.host_pages(layer))
            loader.wait_layer(load, layer)
            self.oracle.read(tokens, slots, layer)
        loader.leave_load(load)
        loader.end_load(load)
        hold.release()

    def close_early(self, tokens: list[int], slots: list[int], taken: int) -> None:
        steps = self.engine.retrieve_layer(tokens, slot_mapping=slots)
        for _ in range(taken):
            next(steps)
        steps.close()
        self.oracle.compute(THREE, slots)
        steps = self.engine.store_layer(THREE, slot_mapping=slots)
        next(steps)
        steps.close()
        self.oracle.zero(slots)

    def run(self) -> None:
        self.save(ONE, HERE)
        self.oracle.compute(TWO, HERE)
        self.save(TWO, THERE)
        assert self.engine.flush()
        self.oracle.zero(THERE)
        self.load(ONE, THERE)
        for taken in (1, 2, 3):
            self.close_early(TWO, HERE, taken)
        self.save(THREE, HERE)
        assert self.engine.flush()
        self.load(TWO, THERE)
        assert self.engine.flush()
        self.load(ONE, HERE)
        self.load(ONE, THERE)
        require_rest(self.engine)
        self.oracle.check()


@pytest.fixture
def races() -> Iterator[Races]:
    platform = Races()
    yield platform
    platform.close()


@pytest.fixture
def start(races: Races, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Traffic]]:
    monkeypatch.setattr(paged, "choose_kernels", WatchedKernels)
    tier, started = MemoryTier(), []

    def make(buffered: bool, lookahead: int = 1, sync: bool = True, fails: bool = False) -> Traffic:
        if fails:
            tier.fails = lambda key: Status.ERROR if key.layer == 2 else Status.OK
        started.append(Traffic(races, buffered, lookahead, sync, tier))
        return started[-1]

    compute = races.new_stream(HOST)
    with races.use_stream(compute):
        yield make
        for traffic in started:
            traffic.engine.close()


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("buffered", [False, True], ids=["paged", "buffer"])
def test_whatever_touches_the_same_memory_is_in_order(
    races: Races, start: Callable[..., Traffic], buffered: bool, lookahead: int, sync: bool
) -> None:
    traffic = start(buffered, lookahead, sync)
    traffic.run()
    assert races.find() is None


def test_layers_that_travel_together_are_in_order(
    races: Races, start: Callable[..., Traffic], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LAYERS", 12)
    monkeypatch.setattr(
        sys.modules[__name__], "SETTINGS", {"staging_bytes": 1 << 16, "group_bytes": 5 * 3 * 1024}
    )
    traffic = start(buffered=False)
    traffic.run()
    assert races.find() is None


@pytest.mark.parametrize("shrinks", [True, False], ids=["coded", "raw beside coded"])
@pytest.mark.parametrize("buffered", [False, True], ids=["paged", "buffer"])
def test_pages_that_are_coded_are_in_order(
    races: Races,
    start: Callable[..., Traffic],
    buffered: bool,
    shrinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "SETTINGS", {"page_codec": "lossless"})
    monkeypatch.setattr(module, "DIMS", {"dtype": torch.bfloat16, "head_size": 4})
    monkeypatch.setattr(choice, "TorchLossless", partial(WatchedCoder, races, shrinks))
    if not shrinks:
        monkeypatch.setattr(module, "MOST_CHUNKS", 96)  # raw pages of all saves at once
        monkeypatch.setattr(module, "require_rest", lambda engine: None)
    traffic = start(buffered)
    if not shrinks:
        traffic.connector.saver._uncodable = frozenset(range(LAYERS))
    traffic.run()
    assert races.find() is None


@pytest.mark.parametrize("buffered", [False, True], ids=["paged", "buffer"])
def test_loads_that_lose_chunks_on_the_way_are_in_order(
    races: Races, start: Callable[..., Traffic], buffered: bool
) -> None:
    traffic = start(buffered, fails=True)
    traffic.save(ONE, HERE)
    traffic.save(TWO, HERE)
    assert traffic.engine.flush()
    traffic.engine._storage.host.evict(6 * LAYERS)
    for tokens, slots in ((ONE, HERE), (TWO, THERE), (ONE, THERE)):
        assert not traffic.engine.retrieve(tokens, slot_mapping=slots).any()
        traffic.oracle.compute(THREE, slots)
    require_rest(traffic.engine)
    assert races.find() is None


@pytest.mark.parametrize(
    ("in_place", "removed"),
    [
        (False, None),
        (False, "_wait_for_buffer"),
        (True, None),
        (True, "_let_wait"),
        (True, "_wait_for_readers"),
    ],
)
def test_keys_turned_on_the_way_are_in_order(
    races: Races,
    start: Callable[..., Traffic],
    in_place: bool,
    removed: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traffic = start(buffered=True, lookahead=0)
    traffic.connector.set_rope(Rope((0.5,)))
    if removed is not None:
        loader = traffic.loader(in_place)
        assert callable(getattr(loader, removed))
        monkeypatch.setattr(loader, removed, lambda *_: None)
    traffic.save(ONE, HERE)
    assert traffic.engine.flush()
    traffic.oracle.zero(THERE)
    traffic.load_turned(ONE, THERE, in_place)
    races.synchronize_device(HOST)
    assert ("nothing orders" in str(races.find())) is (removed is not None)


@pytest.mark.parametrize("removed", [None, "_wait_behind"])
def test_loads_come_behind_the_event_they_are_given(
    races: Races, start: Callable[..., Traffic], removed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is queued after it, and touches other blocks, is not waited for."""
    traffic = start(buffered=True, lookahead=0)
    traffic.connector.set_rope(Rope((0.5,)))
    loader = traffic.loader(in_place=True)
    monkeypatch.setattr(loader, "_wait_for_readers", lambda *_: pytest.fail("it waits for all"))
    if removed is not None:
        monkeypatch.setattr(loader, removed, lambda *_: None)
    traffic.save(ONE, HERE)
    assert traffic.engine.flush()
    traffic.oracle.zero(THERE)
    behind = races.new_event()
    races.record(behind, races.current_stream(HOST))
    traffic.oracle.compute(TWO, HERE)
    traffic.load_turned(ONE, THERE, in_place=True, behind=behind)
    races.synchronize_device(HOST)
    assert ("nothing orders" in str(races.find())) is (removed is not None)


REMOVED: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "the model's reads before a load": lambda connector: (connector.loader, "_wait_for_readers"),
    "a layer's load before the model": lambda connector: (connector.loader, "wait_layer"),
    "filling before emptying, loads": lambda connector: (connector.loader.lane, "pass_on"),
    "emptying before filling, loads": lambda connector: (connector.loader.lane, "_wait_emptied"),
    "the model's writes before a save": lambda connector: (connector.saver, "_wait_for_writers"),
    "filling before emptying, saves": lambda connector: (connector.saver.lane, "pass_on"),
    "emptying before filling, saves": lambda connector: (connector.saver.lane, "_wait_emptied"),
    "a save before the model's next writes": lambda connector: (connector.saver, "leave_save"),
    "a save before its pages are given on": lambda connector: (connector.saver, "_wait_for_copies"),
}


@pytest.mark.parametrize("name", REMOVED)
def test_a_wait_that_is_missing_is_found(
    races: Races, start: Callable[..., Traffic], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = start(buffered=False)
    monkeypatch.setattr(*REMOVED[name](traffic.connector), lambda *_: lambda: None)
    with held_completions(traffic.engine):
        traffic.save(ONE, HERE)
        traffic.oracle.compute(TWO, HERE)
    assert traffic.engine.flush()
    traffic.load(ONE, THERE)
    traffic.load(ONE, HERE)
    races.synchronize_device(HOST)
    assert "nothing orders" in str(races.find())


def test_a_buffer_filled_before_it_was_flushed_is_found(
    races: Races, start: Callable[..., Traffic], monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = start(buffered=True, lookahead=0)
    monkeypatch.setattr(traffic.connector.loader, "_wait_for_buffer", lambda *_: None)
    traffic.save(ONE, HERE)
    assert traffic.engine.flush()
    traffic.load(ONE, THERE)
    races.synchronize_device(HOST)
    assert "nothing orders" in str(races.find())
