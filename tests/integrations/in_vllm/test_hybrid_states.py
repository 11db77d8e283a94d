"""Models of which some layers keep a state: what is loaded gives the answers of what is computed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import BLOCK, Engine, assert_same, prompt, started, with_lwkv

from lwkv.integrations.vllm.hybrid.orders import LoadOrder
from lwkv.integrations.vllm.hybrid.refusals import can_have_groups

pytestmark = pytest.mark.skipif(
    not can_have_groups(vllm.__version__), reason="before 0.32, vLLM cannot load states"
)


@pytest.fixture(scope="module")
def computed(lfm2: Path) -> Iterator[Elsewhere]:
    """The same without lwkv, and without a prefix cache: it cuts prompts nowhere."""
    engine = Elsewhere(lfm2, enable_prefix_caching=False)
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=[2048, 100])
def shared(lfm2: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    arguments = {"max_num_batched_tokens": request.param, "max_num_seqs": 4}
    with started(lfm2, enable_prefix_caching=True, **arguments, **with_lwkv()) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    shared.forget()
    shared.new_hits()
    yield shared
    shared.groups_at_rest()


def same(
    engine: Engine, computed: Elsewhere, ids: list[int], max_tokens: int = 8, forget: bool = True
) -> int:
    """Ask both, compare, and empty vLLM's own cache: how much of the prompt was loaded."""
    engine.new_hits()
    (answer,) = answers = engine.ask([ids], max_tokens)
    assert_same(answers, computed.ask([ids], max_tokens))
    loaded = engine.new_hits()
    assert answer.cached == loaded
    if forget:
        engine.forget()
    return loaded


@pytest.mark.parametrize("length", [700, 257, 256, 255, BLOCK + 1, BLOCK])
def test_the_first_answer_is_computed_and_the_next_ones_are_loaded(
    engine: Engine, computed: Elsewhere, length: int
) -> None:
    ids = prompt(3000 + length, length)
    hits = (length - 1) // BLOCK * BLOCK
    assert [same(engine, computed, ids) for _ in range(3)] == [0, hits, hits]


def test_each_turn_of_a_conversation_loads_what_the_turn_before_computed(
    engine: Engine, computed: Elsewhere
) -> None:
    turn, known = prompt(3030, 100), 0
    for number in range(4):
        assert same(engine, computed, turn, 16) == known // BLOCK * BLOCK
        known = len(turn)
        (answer,) = computed.ask([turn], 16)
        turn = turn + answer.tokens + prompt(3031 + number, 100)


def test_a_prompt_goes_on_where_a_shorter_one_ended(engine: Engine, computed: Elsewhere) -> None:
    begin = prompt(3050, 320)
    hits = [same(engine, computed, begin + prompt(3051 + i, 50 * i)) for i in range(4)]
    assert hits == [0, 320, 320, 320]


def test_prompts_that_part_within_vllm_s_own_cache_are_found_there_later(
    engine: Engine, computed: Elsewhere
) -> None:
    """vLLM has a step end where the second one parts from the first: others go on there."""
    begin = prompt(3055, 310)
    for number in range(2):
        same(engine, computed, begin + prompt(3056 + number, 100), forget=False)
    engine.forget()
    assert same(engine, computed, begin + prompt(3058, 100)) == 288


def test_hits_misses_and_shared_prefixes_in_one_batch(engine: Engine, computed: Elsewhere) -> None:
    first = [prompt(3060, 400), prompt(3061, 300)]
    assert_same(engine.ask(first), computed.ask(first))
    prompts = [*first, prompt(3063, 350), first[1] + prompt(3064, 64), first[0][:200] + prompt(3065, 90)]
    for _ in range(2):
        engine.forget()
        engine.new_hits()
        assert_same(engine.ask(prompts), computed.ask(prompts))
        assert engine.new_hits() >= 384 + 288 + 288


@pytest.mark.parametrize("own", [BLOCK, 160, 384, 608])
def test_lwkv_gives_what_vllm_lacks(engine: Engine, computed: Elsewhere, own: int) -> None:
    """vLLM has the first `own` tokens, and lwkv 672."""
    ids = prompt(3100, 700)
    engine.ask([ids])
    engine.forget()
    engine.ask([[*ids[:own], 501]])
    engine.new_hits()
    (answer,) = answers = engine.ask([ids])
    assert_same(answers, computed.ask([ids]))
    assert answer.cached == 672
    assert 0 < engine.new_hits() < 672


def test_a_request_that_is_aborted_leaves_nothing_held(engine: Engine, computed: Elsewhere) -> None:
    ids = prompt(3150, 300)
    same(engine, computed, ids)
    for steps in range(5):
        engine.abort(ids, after_steps=steps)
        engine.ask([prompt(1, 3)], 1)
        engine.forget()
    engine.groups_at_rest()
    assert same(engine, computed, ids) == 288


class Loading:
    """Loads that are held up on the device for as long as the block lasts."""

    def __init__(self, engine: Engine) -> None:
        self._engines = engine.worker.engine.engines
        self._gate = threading.Event()

    def __enter__(self) -> None:
        for own in self._engines:
            own.connector.loader.lane.kernels.put(lambda: self._gate.wait(30.0))

    def __exit__(self, *_: object) -> None:
        self._gate.set()


def test_other_requests_go_on_while_states_are_loaded_for_one(engine: Engine, computed: Elsewhere) -> None:
    """A load that is not there yet holds up nobody; one whose request is aborted gives its blocks back."""
    ids, other = prompt(3160, 300), prompt(3161, 70)
    same(engine, computed, ids)
    free = engine.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks
    before = free()
    with Loading(engine):
        for number in range(2):
            engine.abort(ids, after_steps=4 + number)
        assert free() < before  # what was aborted still has its blocks, which are written to
        engine.begin("loading", ids)
        engine.begin("other", other, 40)
        answers = engine.step_until("other")
        assert list(answers) == ["other"]
        assert len(engine.worker._under_way) == 3
    answers |= engine.step_until("loading")
    assert_same([answers["other"]], computed.ask([other], 40))
    assert_same([answers["loading"]], computed.ask([ids]))
    assert answers["loading"].cached == 288
    engine.forget()
    assert free() == before


def test_a_load_that_fails_is_computed(
    engine: Engine, computed: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(3170, 300)
    same(engine, computed, ids)
    for own in engine.worker.engine.engines:
        monkeypatch.setattr(own.connector.loader, "load_layer", fails)
    assert_same(engine.ask([ids]), computed.ask([ids]))
    monkeypatch.undo()
    engine.forget()
    assert same(engine, computed, ids) == 288


def fails(*_: object) -> None:
    raise RuntimeError("the device fails")


def test_a_reset_of_the_connector_finds_nothing_that_was_stored_before(
    engine: Engine, computed: Elsewhere
) -> None:
    ids = prompt(3180, 257)
    engine.ask([ids])
    assert engine.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    assert [same(engine, computed, ids) for _ in range(2)] == [0, 256]


class StateBytes:
    """What vLLM has in the blocks of states when lwkv saves them, and when it has loaded them."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        worker = engine.worker
        self.kinds, self.groups = worker.engine.kinds, worker.engine.groups
        self.saved: dict[tuple[int, str], tuple[torch.Tensor, int]] = {}
        self.loaded: dict[tuple[int, str], tuple[torch.Tensor, int]] = {}
        self._ordered: dict[str, LoadOrder] = {}
        end, received = worker.end, worker.received

        def looks_at_stores() -> None:
            if not worker._ended:
                self._ordered |= {order.request_id: order for order in worker._orders.loads_apart}
                for order in worker._orders.stores:
                    if order.end in order.boundaries:
                        self.saved |= self.look(order.end, order.tables)
            end()

        def looks_at_loads() -> tuple[set[str], set[str]]:
            found: tuple[set[str], set[str]] = received()
            for request_id in found[0]:
                order = self._ordered.pop(request_id)
                self.loaded |= self.look(order.boundary, order.tables)
            return found

        monkeypatch.setattr(worker, "end", looks_at_stores)
        monkeypatch.setattr(worker, "received", looks_at_loads)

    def look(self, boundary: int, tables: Sequence[Sequence[int]]) -> dict[Any, Any]:
        """By the boundary and the layer: the state there, and its block."""
        found = {}
        for group, table in zip(self.groups, tables, strict=True):
            if self.kinds[group.kind].form == "state":
                size = self.kinds[group.kind].block_size
                for name, rows in group.caches.items():
                    block = table[boundary // size - 1]
                    assert block != 0
                    found[boundary, name] = rows[block].clone(), block
        return found

    def now(self, name: str, block: int) -> torch.Tensor:
        """What vLLM has in a block of a layer."""
        (rows,) = (group.caches[name] for group in self.groups if name in group.caches)
        return rows[block]


def test_states_are_the_bytes_that_vllm_keeps_of_the_same_tokens(
    engine: Engine, computed: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, ids = StateBytes(engine, monkeypatch), prompt(3190, 600)
    assert same(engine, computed, ids, forget=False) == 0
    at_end = {name: found for (boundary, name), found in states.saved.items() if boundary == 576}
    assert len(at_end) == 2
    for name, (state, block) in at_end.items():
        # vLLM still has it in its prefix cache, and has not written to it since.
        assert torch.equal(states.now(name, block), state)
        assert state.count_nonzero() > len(state) // 2
    # All where the prompt is cut: a state is as much as two tokens of full attention.
    assert {boundary for boundary, _ in states.saved} in ({576}, {*range(96, 577, 96)})
    engine.forget()
    for longer in (ids, ids[:592] + prompt(3191, 70), ids[:577]):
        states.loaded.clear()
        assert same(engine, computed, longer) == 576
        assert len(states.loaded) == 2
        for key, (state, _) in states.loaded.items():
            assert torch.equal(state, states.saved[key][0])
