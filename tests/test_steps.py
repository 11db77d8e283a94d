"""The calls of an engine around a forward pass: hooks come as they like, every step ends in one known way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from oracle import Dims, MemoryTier, Oracle, held_completions, require_rest, run_slots

from lwkv.config.settings import Config
from lwkv.engine import CacheEngine, Request
from lwkv.errors import RequestError
from lwkv.platforms import Platform
from lwkv.steps import LayerSteps, StepResult
from lwkv.storage import Status

CHUNK = 8
LAYERS = 3
ANY_ORDER = settings(
    max_examples=min(40, settings.default.max_examples),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
CACHED, FRESH = list(range(100, 120)), list(range(300, 320))
INTO, FROM = run_slots(32, 20), run_slots(64, 20, backwards=True)
HOOKS = st.tuples(st.sampled_from(["start", "wait", "save"]), st.integers(-1, LAYERS + 1))


class Run:
    """One engine with CACHED in it, and its steps."""

    def __init__(self, oracle: Oracle, engine: CacheEngine) -> None:
        self.oracle, self.engine, self.steps = oracle, engine, LayerSteps(engine)
        oracle.compute(CACHED, run_slots(0, 20))
        engine.store(CACHED, slot_mapping=run_slots(0, 20))
        assert engine.flush()
        oracle.zero(run_slots(0, 20))
        self.loads = [Request(CACHED, INTO)]
        self.stores = [Request(FRESH, FROM)]

    def forward(self, waits: int = 1, saves: int = 1) -> None:
        """One pass over the layers, with each hook called so many times."""
        for layer in range(LAYERS):
            for _ in range(waits):
                self.steps.wait_for_layer_load(layer)
            self.oracle.compute(FRESH, FROM, [layer])
            for _ in range(saves):
                self.steps.save_kv_layer(layer)

    def require(self, result: StepResult, loaded: bool, stored: bool) -> None:
        """The step's end is told rightly; loads are on the device in any case."""
        assert [mask.tolist() for mask in result.loaded] == [[loaded and i < 16 for i in range(20)]]
        assert result.stored is stored
        self.oracle.expect(CACHED, INTO, [i < 16 for i in range(20)])
        require_rest(self.engine)
        assert self.engine.lookup(FRESH) == (16 if stored else 0)
        self.oracle.check()


@pytest.fixture
def oracle(platform: Platform, device: torch.device) -> Oracle:
    return Oracle(platform, device, dims=Dims(blocks=32))


@pytest.fixture
def run(oracle: Oracle) -> Iterator[Run]:
    with oracle.engine(CHUNK) as engine:
        yield Run(oracle, engine)


@pytest.mark.parametrize("saves", [1, 2])
@pytest.mark.parametrize("waits", [1, 2])
def test_each_hook_may_come_once_or_twice(run: Run, waits: int, saves: int) -> None:
    run.steps.begin(run.loads, run.stores)
    assert run.steps.start_load_kv() == [16]
    assert run.steps.start_load_kv() == [16]
    run.forward(waits, saves)
    run.require(run.steps.wait_for_save(), loaded=True, stored=True)


def test_the_start_may_be_left_to_the_first_layer(run: Run) -> None:
    run.steps.begin(run.loads, run.stores)
    run.forward()
    run.require(run.steps.wait_for_save(), loaded=True, stored=True)


@pytest.mark.parametrize("num_hooks", [0, 1, 2])
def test_layer_by_layer_too_all_layers_can_be_loaded_before_a_graph_that_calls_no_hooks(
    run: Run, num_hooks: int
) -> None:
    run.steps.begin(run.loads, run.stores)
    assert run.steps.load_all() == [16]
    run.forward(num_hooks, num_hooks)
    run.require(run.steps.wait_for_save(), loaded=True, stored=True)


@pytest.mark.parametrize("started", [False, True])
def test_a_replayed_graph_calls_no_hook_so_nothing_is_trusted(run: Run, started: bool) -> None:
    run.steps.begin(run.loads, run.stores)
    if started:
        assert run.steps.start_load_kv() == [16]
    run.oracle.compute(FRESH, FROM)
    run.require(run.steps.wait_for_save(), loaded=False, stored=False)


@pytest.mark.parametrize("skipped", range(LAYERS))
def test_a_layer_saved_before_its_load_was_waited_for_is_not_trusted(run: Run, skipped: int) -> None:
    run.steps.begin(run.loads, run.stores)
    for layer in range(LAYERS):
        if layer != skipped:
            run.steps.wait_for_layer_load(layer)
        run.oracle.compute(FRESH, FROM, [layer])
        run.steps.save_kv_layer(layer)
    run.require(run.steps.wait_for_save(), loaded=False, stored=False)


def test_saves_that_never_came_are_made_at_the_end(run: Run) -> None:
    run.steps.begin(run.loads, run.stores)
    run.forward(saves=0)
    run.require(run.steps.wait_for_save(), loaded=True, stored=True)
    run.steps.begin([Request(FRESH, INTO)], [])
    run.steps.wait_for_layer_load(LAYERS - 1)
    assert int(run.steps.wait_for_save().loaded[0].sum()) == 16
    run.oracle.expect(FRESH, INTO, [i < 16 for i in range(20)])
    run.oracle.check()


@ANY_ORDER
@given(st.lists(HOOKS, max_size=12))
@example([("wait", 2), ("save", 2), ("save", 0), ("wait", 0), ("save", 1)])
def test_hooks_in_any_order_end_the_step_and_an_unwaited_layer_is_never_trusted(
    platform: Platform, device: torch.device, hooks: Sequence[tuple[str, int]]
) -> None:
    oracle = Oracle(platform, device, dims=Dims(blocks=32))
    with oracle.engine(CHUNK) as engine:
        run = Run(oracle, engine)
        oracle.compute(FRESH, FROM)
        run.steps.begin(run.loads, run.stores)
        reached, trusted = -1, True
        for name, layer in hooks:
            if name == "start":
                assert run.steps.start_load_kv() == [16]
            elif name == "wait":
                run.steps.wait_for_layer_load(layer)
                reached = max(reached, layer) if layer in range(LAYERS) else reached
            else:
                trusted &= reached >= layer or layer not in range(LAYERS)
                run.steps.save_kv_layer(layer)
        trusted &= reached >= LAYERS - 1
        run.require(run.steps.wait_for_save(), loaded=trusted, stored=trusted)


def test_a_layer_is_in_place_once_it_has_been_waited_for(run: Run) -> None:
    run.steps.begin(run.loads, [])
    run.steps.start_load_kv()
    for layer in range(LAYERS):
        run.steps.wait_for_layer_load(layer)
        run.oracle.read(CACHED[:16], INTO[:16], layer)
    run.require(run.steps.wait_for_save(), loaded=True, stored=False)


def test_the_end_of_a_step_may_be_asked_for_twice(run: Run) -> None:
    run.steps.begin(run.loads, run.stores)
    run.forward()
    result = run.steps.wait_for_save()
    assert run.steps.wait_for_save() is result
    run.require(result, loaded=True, stored=True)


def test_a_step_may_have_nothing_to_do(run: Run) -> None:
    run.steps.begin([], [])
    assert run.steps.start_load_kv() == []
    run.forward(waits=2, saves=2)
    assert run.steps.wait_for_save() == StepResult([], stored=False)
    require_rest(run.engine)


def test_hooks_before_any_step_do_nothing(run: Run) -> None:
    run.forward()
    assert run.steps.wait_for_save() == StepResult([], stored=False)


def test_a_step_without_loads_stores(run: Run) -> None:
    run.steps.begin([], run.stores)
    run.forward(waits=0)
    assert run.steps.wait_for_save().stored
    require_rest(run.engine)
    assert run.engine.lookup(FRESH) == 16


def test_a_step_that_misses_everything_still_stores(run: Run) -> None:
    run.steps.begin([Request(list(range(20)), INTO)], run.stores)
    assert run.steps.start_load_kv() == [0]
    run.forward()
    result = run.steps.wait_for_save()
    assert (int(result.loaded[0].sum()), result.stored) == (0, True)
    require_rest(run.engine)


@pytest.mark.parametrize("hooks", range(LAYERS + 1))
def test_beginning_anew_gives_the_unfinished_step_up(run: Run, hooks: int) -> None:
    run.steps.begin(run.loads, run.stores)
    for layer in range(hooks):
        run.steps.wait_for_layer_load(layer)
        run.steps.save_kv_layer(layer)
    run.oracle.expect(CACHED, INTO, [i < 16 for i in range(20)], layers=range(min(LAYERS, 2 * hooks)))
    run.steps.begin(run.loads, run.stores)
    assert run.engine.flush()  # until then the chunks of the former step count as on their way
    run.forward()
    run.require(run.steps.wait_for_save(), loaded=True, stored=True)


def test_a_step_that_is_refused_leaves_the_one_before(run: Run) -> None:
    run.steps.begin(run.loads, run.stores)
    run.steps.start_load_kv()
    wrong = Request(FRESH, FROM[:-1])
    for loads, stores in (([wrong], []), ([], [wrong]), (run.loads, [wrong])):
        with pytest.raises(RequestError):
            run.steps.begin(loads, stores)
    run.forward()
    run.require(run.steps.wait_for_save(), loaded=True, stored=True)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_failed_load_is_reported_and_nothing_of_its_step_is_stored(oracle: Oracle, layer: int) -> None:
    tier = MemoryTier()
    with oracle.engine(CHUNK, tiers=[tier]) as engine:
        Run(oracle, engine)
    with oracle.engine(CHUNK, tiers=[tier]) as engine:
        tier.fails = lambda key: Status.ERROR if key.layer == layer else Status.OK
        steps = LayerSteps(engine)
        steps.begin([Request(CACHED, INTO)], [Request(FRESH, FROM)])
        assert steps.start_load_kv() == [16]
        for number in range(LAYERS):
            steps.wait_for_layer_load(number)
            oracle.compute(FRESH, FROM, [number])
            steps.save_kv_layer(number)
        result = steps.wait_for_save()
        assert (int(result.loaded[0].sum()), result.stored) == (0, False)
        oracle.forget(INTO, [i < 16 for i in range(20)])
        require_rest(engine)
        assert engine.lookup(FRESH) == 0
        oracle.check()


def test_requests_of_one_step_store_a_shared_prefix_once(run: Run) -> None:
    tokens = [FRESH[:16] + [1] * 8, FRESH[:16] + [2] * 8]
    requests = [Request(t, run_slots(32 * i, 24)) for i, t in enumerate(tokens)]
    for request in requests:
        run.oracle.compute(request.tokens, request.slot_mapping)
    before = run.engine.stats()["chunks"]
    run.steps.begin([], requests)
    for layer in range(LAYERS):
        run.steps.save_kv_layer(layer)
    assert run.steps.wait_for_save().stored
    require_rest(run.engine)
    assert run.engine.stats()["chunks"] - before == 4


class Shared:
    """An engine with entries that share the KV of another one."""

    ENTRIES = ("a", "b", "twin of a", "c", "twin of b")
    OWNERS = (0, 1, 0, 2, 1)

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.tensors = list(oracle.kvcaches.values())

    def open(self) -> CacheEngine:
        caches = {name: self.tensors[owner] for name, owner in zip(self.ENTRIES, self.OWNERS, strict=True)}
        engine = CacheEngine.create(
            Config(chunk_size=CHUNK, use_layerwise=True),
            self.oracle.metadata,
            caches,
            layout_hints={"block_size": self.oracle.dims.block_size},
            platform=self.oracle.platform,
        )
        assert engine.wait_for_memory(20.0), "host memory is page-locked in the background"
        return engine

    def forward(self, steps: LayerSteps, layers: Sequence[str | int], tokens: list[int], slots: Any) -> None:
        """One pass, in which only an entry that owns its KV writes it."""
        for position, layer in enumerate(layers):
            steps.wait_for_layer_load(layer)
            owner = self.OWNERS[position]
            if owner not in self.OWNERS[:position]:
                self.oracle.compute(tokens, slots, [owner])
            steps.save_kv_layer(layer)


@pytest.mark.parametrize("layers", [Shared.ENTRIES, range(5)], ids=["names", "positions"])
def test_layers_that_share_their_kv_are_counted_as_the_engine_registered_them(
    oracle: Oracle, layers: Sequence[str | int]
) -> None:
    shared = Shared(oracle)
    with shared.open() as engine:
        assert engine.num_layers == LAYERS
        assert [engine.connector.layer_of[layer] for layer in layers] == list(Shared.OWNERS)
        steps = LayerSteps(engine)
        steps.begin([], [Request(FRESH, FROM)])
        shared.forward(steps, layers, FRESH, FROM)
        assert steps.wait_for_save().stored
        assert engine.flush()
        oracle.zero(FROM)
        steps.begin([Request(FRESH, INTO)], [])
        for position, layer in enumerate(layers):
            steps.wait_for_layer_load(layer)
            oracle.read(FRESH[:16], INTO[:16], Shared.OWNERS[position])
        assert int(steps.wait_for_save().loaded[0].sum()) == 16
        oracle.expect(FRESH, INTO, [i < 16 for i in range(20)])
        oracle.check()
        require_rest(engine)


def test_a_layer_that_shares_its_kv_saves_nothing_before_its_owner(oracle: Oracle) -> None:
    shared = Shared(oracle)
    with shared.open() as engine:
        steps = LayerSteps(engine)
        steps.begin([], [Request(FRESH, FROM)])
        steps.save_kv_layer("twin of a")
        shared.forward(steps, Shared.ENTRIES, FRESH, FROM)
        assert steps.wait_for_save().stored
        assert engine.flush()
        engine.retrieve(FRESH, slot_mapping=INTO)
        oracle.expect(FRESH, INTO, [i < 16 for i in range(20)])
        oracle.check()


@pytest.mark.parametrize("layer", [-1, LAYERS, "no such", None, [0], 0.5], ids=repr)
def test_a_layer_that_was_not_registered_is_passed_over_with_one_line(
    run: Run, caplog: pytest.LogCaptureFixture, layer: Any
) -> None:
    run.steps.begin(run.loads, run.stores)
    for hook in (run.steps.wait_for_layer_load, run.steps.save_kv_layer) * 2:
        hook(layer)
    (line,) = caplog.messages
    assert f"no layer {layer!r} is registered" in line
    assert "'layer_0', or a position from 0 to 2" in line
    run.forward()
    run.require(run.steps.wait_for_save(), loaded=True, stored=True)


@pytest.mark.parametrize(
    ("loads", "stores"), [([FRESH], []), ([], [FRESH]), (None, None), ([], None), (Request(FRESH, FROM), [])]
)
def test_a_step_of_anything_but_requests_is_refused(run: Run, loads: Any, stores: Any) -> None:
    with pytest.raises(RequestError, match=r"of type (list|NoneType|Request); pass"):
        run.steps.begin(loads, stores)
    assert run.steps.wait_for_save() == StepResult([], stored=False)


def test_many_steps_follow_each_other(run: Run) -> None:
    for number in range(5):
        fresh = [1000 * (number + 1) + i for i in range(20)]
        requests: dict[str, Any] = {"loads": run.loads, "stores": [Request(fresh, FROM)]}
        run.oracle.zero(INTO)
        run.steps.begin(**requests)
        assert run.steps.start_load_kv() == [16]
        for layer in range(LAYERS):
            run.steps.wait_for_layer_load(layer)
            run.oracle.compute(fresh, FROM, [layer])
            run.steps.save_kv_layer(layer)
        result = run.steps.wait_for_save()
        assert result.stored
        run.oracle.expect(CACHED, INTO, result.loaded[0])
        run.oracle.check()
    require_rest(run.engine)


# In bulk.


@pytest.fixture
def bulk(oracle: Oracle) -> Iterator[Run]:
    with oracle.engine(CHUNK, use_layerwise=False) as engine:
        yield Run(oracle, engine)


def calls_of(engine: CacheEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What is queued and waited for from here on, with its layer or layers."""
    calls: list[tuple[str, Any]] = []
    loader, saver = engine.connector.loader, engine.connector.saver
    for half, name in ((loader, "load_layer"), (loader, "wait_layer"), (saver, "save_layers")):

        def record(batch: Any, layer: Any, *rest: Any, name: str = name, call: Any = None) -> None:
            calls.append((name, layer))
            call(batch, layer, *rest)

        monkeypatch.setattr(half, name, partial(record, name=name, call=getattr(half, name)))
    return calls


def test_in_bulk_the_start_queues_and_waits_for_all_layers_and_the_end_saves_all(
    bulk: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_of(bulk.engine, monkeypatch)
    bulk.steps.begin(bulk.loads, bulk.stores)
    assert bulk.steps.start_load_kv() == [16]
    assert calls[:LAYERS] == [("load_layer", layer) for layer in range(LAYERS)]
    assert calls[LAYERS] == ("wait_layer", LAYERS - 1)
    before = len(calls)
    for layer in range(LAYERS):
        bulk.oracle.read(CACHED[:16], INTO[:16], layer)
    bulk.forward()
    assert len(calls) == before, "nothing moves while the model computes"
    result = bulk.steps.wait_for_save()
    assert calls[before:] == [("save_layers", range(LAYERS))]
    bulk.require(result, loaded=True, stored=True)


def test_layer_by_layer_each_hook_moves_its_layer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(run.engine, monkeypatch)
    monkeypatch.setattr(run.engine.connector.loader, "layers_ahead", lambda load, layer, known: 0)
    run.steps.begin(run.loads, run.stores)
    assert run.steps.look_up() == run.steps.start_load_kv()
    assert calls == [("load_layer", 0)]
    run.steps.wait_for_layer_load(0)
    assert calls[1:] == [("load_layer", 1), ("wait_layer", 0)]
    run.oracle.compute(FRESH, FROM, [0])
    run.steps.save_kv_layer(0)
    assert calls[3:] == [("save_layers", range(1))]
    run.forward()
    run.require(run.steps.wait_for_save(), loaded=True, stored=True)


def test_in_bulk_a_start_alone_is_enough_for_the_model_to_go_on(bulk: Run) -> None:
    bulk.steps.begin(bulk.loads, bulk.stores)
    bulk.steps.start_load_kv()
    bulk.oracle.compute(FRESH, FROM)
    bulk.require(bulk.steps.wait_for_save(), loaded=True, stored=True)


def test_in_bulk_too_a_layer_computed_before_the_start_is_not_trusted(bulk: Run) -> None:
    bulk.steps.begin(bulk.loads, bulk.stores)
    bulk.oracle.compute(FRESH, FROM)
    bulk.steps.save_kv_layer(0)
    bulk.require(bulk.steps.wait_for_save(), loaded=False, stored=False)


def test_the_caller_may_choose_the_mode_itself(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(run.engine, monkeypatch)
    run.steps = LayerSteps(run.engine, layerwise=False)
    run.steps.begin(run.loads, [])
    run.steps.start_load_kv()
    assert calls[:LAYERS] == [("load_layer", layer) for layer in range(LAYERS)]
    run.require(run.steps.wait_for_save(), loaded=True, stored=False)


@pytest.mark.parametrize(
    ("layerwise", "text"),
    [(True, "moves KV layer by layer: "), (False, "moves KV in bulk (use_layerwise is off): ")],
)
def test_the_engine_says_in_its_first_line_how_it_moves(
    oracle: Oracle, layerwise: bool, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "lwkv.engine"), oracle.engine(CHUNK, use_layerwise=layerwise):
        assert [message[: len(text)] for message in caplog.messages if "moves KV" in message] == [text]


# A device that fails.


@pytest.mark.parametrize("layerwise", [True, False], ids=["layer by layer", "bulk"])
@pytest.mark.parametrize("place", [("wait_layer", k) for k in range(LAYERS)] + [("load_layer", 1)], ids=str)
def test_a_load_that_fails_on_the_device_is_told_by_the_result_and_no_hook_raises(
    run: Run, place: tuple[str, int], layerwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(run.engine, *place, monkeypatch)
    run.steps = LayerSteps(run.engine, layerwise)
    run.steps.begin(run.loads, run.stores)
    run.steps.start_load_kv()
    run.forward(waits=2, saves=2)
    result = run.steps.wait_for_save()
    if layerwise or place[0] == "load_layer" or place[1] == LAYERS - 1:
        assert ([int(mask.sum()) for mask in result.loaded], result.stored) == ([0], False)
        assert run.engine.stats()["load_failures_device"] == 2
    assert len(result.loaded[0]) == 20
    monkeypatch.undo()
    require_rest(run.engine)
    run.oracle.forget(INTO, [i < 16 for i in range(20)])
    run.steps.begin(run.loads, run.stores)
    run.forward()
    run.require(run.steps.wait_for_save(), loaded=True, stored=True)


def test_a_store_that_failed_is_not_committed_however_late_it_ends(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(run.engine, "save_layers", 1, monkeypatch)
    with held_completions(run.engine):
        run.steps.begin((), run.stores)
        run.forward()
        run.steps.wait_for_save()
    assert run.engine.flush()
    assert run.engine.lookup(FRESH) == 0
    require_rest(run.engine)


@pytest.mark.parametrize(
    "place", [("save_layers", k) for k in range(LAYERS)] + [("begin_save", None)], ids=str
)
def test_a_store_that_fails_on_the_device_keeps_nothing_and_no_hook_raises(
    run: Run, place: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(run.engine, *place, monkeypatch)
    run.steps.begin(run.loads, run.stores)
    run.forward()
    result = run.steps.wait_for_save()
    assert int(result.loaded[0].sum()) == 16
    require_rest(run.engine)
    assert run.engine.lookup(FRESH) == 0
    assert run.engine.stats()["store_failures"] == 1
    run.oracle.expect(CACHED, INTO, result.loaded[0])
    run.oracle.check()


def fail(engine: CacheEngine, name: str, layer: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a call of the loader or the saver raise, for one layer or whatever it is for."""
    half: Any = engine.connector.saver if "save" in name else engine.connector.loader
    call = getattr(half, name)

    def failing(batch: Any, number: Any, *rest: Any) -> Any:
        if layer is None or layer in (number if isinstance(number, range) else (number,)):
            raise RuntimeError("the device is lost, says the test")
        return call(batch, number, *rest)

    monkeypatch.setattr(half, name, failing)


class Broken:
    """A retrieval or a store that gets through `left` calls and then breaks; its end must be asked for."""

    is_open, reached, next_layer, closed = False, -1, 0, False

    def __init__(self, left: int) -> None:
        self._left = left

    def open(self) -> list[int]:
        self._pass()
        self.is_open = True
        return [16]

    def advance(self, layer: int) -> None:
        while self.reached < layer:
            self._pass()
            self.reached, self.next_layer = self.reached + 1, self.next_layer + 1

    def finish(self) -> list[torch.Tensor]:
        self.advance(LAYERS)
        raise RuntimeError("broken, says the test")

    def commit(self) -> None:
        self.finish()

    def close(self) -> None:
        self.closed = True

    def _pass(self) -> None:
        assert not self.closed, "what has ended must not be used"
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("broken, says the test")


@pytest.mark.parametrize("left", range(LAYERS + 2))
def test_a_batch_that_breaks_is_ended_and_the_hooks_go_on_without_it(
    run: Run, left: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What fails there is absorbed below; should something get through, the model still goes on."""
    broken = [Broken(left), Broken(min(left, LAYERS))]
    monkeypatch.setattr(run.engine, "retrieval", lambda loads, sync, within_s, pinned: broken[0])
    monkeypatch.setattr(run.engine, "storing", lambda stores: broken[1])
    run.steps.begin(run.loads, run.stores)
    run.steps.start_load_kv()
    run.forward(waits=2, saves=2)
    result = run.steps.wait_for_save()
    assert (len(result.loaded[0]), int(result.loaded[0].sum()), result.stored) == (20, 0, False)
    assert run.steps.wait_for_save() is result
    assert [batch.closed for batch in broken] == [True, True]
    assert 1 <= len(caplog.records) <= 2


# Prompts in pieces, and steps that have nothing to do.


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 0, 3, 1]], ids=str)
def test_a_prompt_stored_in_pieces_is_whole_whichever_ends_first(run: Run, order: list[int]) -> None:
    tokens, slots = list(range(700, 745)), run_slots(64, 45)
    ends = [9, 18, 27, 36, 45]
    run.oracle.compute(tokens, slots)
    pieces = []
    for start, end in zip([0, *ends], ends, strict=False):
        request = Request(tokens[:end], slots[:end], [i >= start for i in range(end)])
        pieces.append(run.engine.store_batch([request]))
        next(pieces[-1])
    for number in order[:-1]:
        list(pieces[number])
    assert run.engine.flush()
    assert run.engine.lookup(tokens) < 40
    list(pieces[order[-1]])
    require_rest(run.engine)
    assert run.engine.lookup(tokens) == 40
    run.oracle.zero(slots)
    mask = run.engine.retrieve(tokens, slot_mapping=slots)
    assert mask.tolist() == [i < 40 for i in range(45)]
    run.oracle.expect(tokens, slots, mask)
    run.oracle.check()


def test_a_prompt_computed_in_pieces_is_done_when_all_its_steps_are(run: Run) -> None:
    tokens, slots = list(range(700, 745)), run_slots(64, 45)
    run.oracle.compute(tokens, slots)
    with held_completions(run.engine):
        for start in range(0, 45, 9):
            end = start + 9
            request = Request(tokens[:end], slots[:end], [i >= start for i in range(end)])
            run.steps.begin([], [request])
            for layer in range(LAYERS):
                run.steps.save_kv_layer(layer)
            assert run.steps.wait_for_save().stored
            assert not run.engine.flush(timeout_s=0)
        assert (run.engine.lookup(tokens), run.engine.stats()["writes_in_flight"]) == (0, 5)
    require_rest(run.engine)
    assert run.engine.lookup(tokens) == 40


class Untouched:
    """Stands for what must not be used."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was used")


def test_a_step_with_nothing_to_move_uses_neither_device_nor_tiers_nor_hashes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What decoding pays for each token, whatever the number of layers."""
    for name in ("_storage", "_prompt_keys", "_pool", "_completions", "_parts"):
        monkeypatch.setattr(run.engine, name, Untouched())
    for name in ("platform", "loader", "saver", "kernels"):
        monkeypatch.setattr(run.engine.connector, name, Untouched())
    run.steps.begin([], [])
    assert run.steps.start_load_kv() == []
    for layer in range(LAYERS):
        run.steps.wait_for_layer_load(layer)
        run.steps.save_kv_layer(layer)
    assert run.steps.wait_for_save() == StepResult([], stored=False)


def test_a_prompt_that_is_not_cached_uses_nothing_of_the_device(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("platform", "loader", "kernels"):
        monkeypatch.setattr(run.engine.connector, name, Untouched())
    run.steps.begin([Request(FRESH, INTO)], [])
    assert run.steps.start_load_kv() == [0]
    for layer in range(LAYERS):
        run.steps.wait_for_layer_load(layer)
    assert not run.steps.wait_for_save().loaded[0].any()
