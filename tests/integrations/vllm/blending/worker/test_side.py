"""Orders carried out on lwkv's own model, called layer by layer as vLLM's is."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from blend.conftest import DOCUMENTS, SHARED, Bench, prompt
from small_llama import small_shape
from storage.faulty_tier import FaultyTier
from torch import Tensor

from lwkv.blend import AllTokens, Deviation, FirstTokens, NoTokens, QueryAttention, Selector
from lwkv.blend.forward.attention import attend
from lwkv.blend.forward.paged_rows import PagedRows
from lwkv.blend.request import Segment
from lwkv.blend.segment_cache import SegmentCache
from lwkv.blend.share.batch_shares import Shares
from lwkv.blend.share.controller import LoadingController
from lwkv.integrations.vllm.blending.model.calls import Layers, Seen
from lwkv.integrations.vllm.blending.model.runs import pieces
from lwkv.integrations.vllm.blending.orders import BlendOrder, EncodeOrder
from lwkv.integrations.vllm.blending.worker.ranks import Ranks
from lwkv.integrations.vllm.blending.worker.share import ControlledShare
from lwkv.integrations.vllm.blending.worker.side import BlendWorker, question_of
from lwkv.pipeline.retrieval import BatchRetrieval
from lwkv.platforms.protocol import Int64s
from lwkv.reference.blending import ReferenceBlend
from lwkv.telemetry.counters import Counters

BLOCK = 5


@dataclass
class Call:
    """Rows that are computed together, and the slots of all tokens."""

    rows: slice
    positions: Int64s
    slots: Int64s


@dataclass
class States:
    """What is between two layers."""

    hidden: Tensor
    residual: None = None


class ReferenceLayers:
    """`Layers` on lwkv's own model, with vLLM's contract: a call writes its rows, then reads the blocks."""

    def __init__(self, bench: Bench, rows: PagedRows, most_rows: int = 7, most_runs: int = 3) -> None:
        self._model, self._rows = ReferenceBlend(bench.model), rows
        self.num_layers = self._model.num_layers
        self._most = most_rows, most_runs
        self.num_rows, self.most_gap = 0, 1
        self._seen: list[tuple[Tensor, Tensor]] = []
        self.fails_at: int | None = None

    def eagerly(self) -> AbstractContextManager[None]:
        return nullcontext()

    def embed(self, tokens: Int64s) -> Any:
        return States(self._model.embed(torch.from_numpy(tokens)))

    def calls(self, positions: Int64s, slots: Int64s) -> list[Any]:
        found = pieces(positions, *self._most)
        return [Call(slice(a, b), positions[a:b], slots) for a, b, _ in found]

    def run(self, layer: int, calls: Sequence[Any], states: Any) -> Any:
        if layer == self.fails_at:
            raise RuntimeError("the device fails")
        return States(torch.cat([self._run(layer, call, states.hidden[call.rows]) for call in calls]))

    def keys_and_values(self, layer: int, calls: Sequence[Any], states: Any) -> tuple[Tensor, Tensor]:
        at = torch.from_numpy(np.concatenate([call.positions for call in calls]))
        angles = self._model.angles(at, len(calls[0].slots))
        _, k, v = self._model.project(layer, states.hidden, angles)
        return k, v

    def run_seen(self, layer: int, calls: Sequence[Any], states: Any) -> Seen:
        self._seen = []
        states = self.run(layer, calls, states)
        q, attended = (torch.cat(parts) for parts in zip(*self._seen, strict=True))
        return Seen(states, q, attended)

    def _run(self, layer: int, call: Call, hidden: Tensor) -> Tensor:
        self.num_rows += len(call.positions)
        at = torch.from_numpy(call.positions)
        q, k, v = self._model.project(layer, hidden, self._model.angles(at, len(call.slots)))
        self._rows.write(layer, self._rows.at(self._rows.send(call.slots[call.positions])), k, v)
        seen = call.slots[: int(call.positions[-1]) + 1]
        keys, values = self._rows.read(layer, self._rows.at(self._rows.send(seen)))
        attended = attend(q, keys, values, at)
        self._seen.append((q, attended))
        return self._model.finish(layer, hidden, attended)


class Rig:
    """A worker's half and lwkv's own blender on one engine."""

    def __init__(
        self, selector: Selector, share: float, tiers: Sequence[Any] = (), ranks: Ranks | None = None
    ) -> None:
        device = torch.device("cpu")
        self.bench = Bench(small_shape(4), device, tiers=tiers)
        self.blender = self.bench.blender(NoTokens(), share=0.0)
        self.segments = SegmentCache(self.bench.engine, SHARED)
        self.rows = PagedRows(self.segments.connector)
        self.layers = ReferenceLayers(self.bench, self.rows)
        self.counters = Counters()
        layers: Layers = self.layers
        self.worker = BlendWorker(self.segments, layers, selector, share, BLOCK, self.counters, ranks)

    def run(self, blends: Sequence[BlendOrder] = (), encodes: Sequence[EncodeOrder] = ()) -> set[int]:
        self.worker.begin_step(blends, encodes)
        self.worker.encode()
        self.worker.blend(())
        return self.worker.invalid_blocks()

    def encode(self, documents: Sequence[Sequence[int]] = DOCUMENTS) -> None:
        for document in documents:
            slots = np.arange(len(SHARED) + len(document)) + 40
            self.run(encodes=[EncodeOrder(np.array(document, np.int64), (), slots)])
        assert self.bench.engine.flush()
        self.bench.cache.fill(float("nan"))

    def kv(self, slots: Int64s) -> list[tuple[Tensor, Tensor]]:
        at = self.rows.at(self.rows.send(slots))
        return [self.rows.read(layer, at) for layer in range(self.layers.num_layers)]

    def expected(self, tokens: Sequence[int], request: Any, selector: Any, share: float, end: int) -> Any:
        """The KV of the first `end` tokens as lwkv's own blender leaves it."""
        blender = self.bench.blender(selector, share=share)
        blender.prefill([request])
        return self.kv(np.asarray(request.slot_mapping)[:end])


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    share = getattr(request, "param", 0.0)
    rig = Rig(Deviation("v", (1,), (share,)), share)
    yield rig
    rig.bench.close()


def whole_blocks(seed: int, count: int) -> Int64s:
    """The slots of blocks in any order, above those that documents are encoded in."""
    blocks = np.random.default_rng(seed).permutation(np.arange(20, 60))[:count]
    slots: Int64s = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
    return slots


def order_of(tokens: Sequence[int], request: Any, end: int, **more: Any) -> BlendOrder:
    values: dict[str, Any] = {"num_local": 0, "num_exact": 0} | more
    slots = whole_blocks(4, -(-len(tokens) // BLOCK))[:end]
    segments = tuple(Segment(*part) for part in request.segments)
    return BlendOrder(np.array(tokens, np.int64), (), slots, segments=segments, **values)


def assert_near(found: Any, wanted: Any) -> None:
    for layer in zip(found, wanted, strict=True):
        for one, other in zip(*layer, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rig", [0.0, 1.0], indirect=True)
def test_nothing_and_everything_computed_again_equal_lwkvs_own_blender(rig: Rig) -> None:
    rig.encode()
    tokens, request = prompt([2, 0, 1])
    end = 45
    order = order_of(tokens, request, end)
    assert rig.run([order]) == set()
    found = rig.kv(order.slots)
    share = rig.worker.share
    selector = AllTokens() if share else NoTokens()
    assert_near(found, rig.expected(tokens, request, selector, share, end))
    totals = rig.counters.totals()
    reused = sum(max(min(b, end) - a, 0) for a, b in request.segments)
    assert totals["blend_tokens_reused"] == reused
    assert totals["blend_tokens_computed"] == end - reused
    assert totals["blend_tokens_chosen"] == (reused if share else 0)


@pytest.mark.parametrize("rig", [0.3], indirect=True)
def test_a_share_is_computed_from_the_check_layer_on(rig: Rig) -> None:
    rig.encode()
    tokens, request = prompt([1, 2, 0])
    order = order_of(tokens, request, 45)
    before = rig.layers.num_rows
    assert rig.run([order]) == set()
    chosen = rig.counters.totals()["blend_tokens_chosen"]
    reused = rig.counters.totals()["blend_tokens_reused"]
    assert round(0.3 * reused) <= chosen < reused
    rows = rig.layers.num_rows - before
    assert rows == 45 + (rig.layers.num_layers - 1) * (45 - reused + chosen)


@pytest.mark.parametrize("share", [0.1, 0.3])
@pytest.mark.parametrize(
    "selector",
    [
        FirstTokens(),
        QueryAttention(1, 2),
        QueryAttention(0, 3),
        Deviation(),
        Deviation("k", (1, 3), (0.5, 0.3)),
    ],
)
def test_what_is_chosen_equals_lwkvs_own_choice(rig: Rig, selector: Selector, share: float) -> None:
    rig.encode()
    tokens, request = prompt([2, 0, 1])
    end = 46  # of the last document
    rig.worker.selector, rig.worker.share, rig.layers.most_gap = selector, share, 0
    order = asked_order(tokens, request, end)
    assert rig.run([order]) == set()
    found = rig.kv(order.slots)
    assert_near(found, rig.expected(tokens, request, selector, share, end))
    chosen = int(rig.counters.totals()["blend_tokens_chosen"])
    assert 0 < chosen <= round(42 * share)
    assert "blend_questions_missing" not in rig.counters.totals()


def asked_order(tokens: Sequence[int], request: Any, end: int) -> BlendOrder:
    """With the slots of what stands behind the blend."""
    whole = whole_blocks(4, -(-len(tokens) // BLOCK))[: len(tokens)]
    return replace(order_of(tokens, request, end), question_slots=whole[end:])


def test_more_are_computed_where_that_hides_behind_the_loading(rig: Rig) -> None:
    rig.encode()
    tokens, request = prompt([2, 0, 1])
    rig.worker.selector, rig.worker.share, rig.layers.most_gap = Deviation(), 0.15, 0
    connector, controller = rig.segments.connector, LoadingController(0.15)
    shares = Shares(0.15, controller, connector.platform, connector.device, rig.counters)
    rig.worker.controlled = ControlledShare(shares, rig.layers.num_layers, 1, 1000)
    order = order_of(tokens, request, 46)
    noted, note, before = list[int](), shares.note, rig.layers.num_rows
    shares.note = lambda work, rows, pace: (noted.append(rows), note(work, rows, pace))[1]  # type: ignore
    assert rig.run([order]) == set()
    assert noted == [rig.layers.num_rows - before]
    first = int(rig.counters.totals()["blend_tokens_chosen"])
    assert first == round(0.15 * 42)
    assert rig.counters.totals()["blend_decisions_unmeasured"] == 1
    # The first blend was timed; these are the speeds of a slow tier.
    controller.learn = lambda *timed: None  # type: ignore[method-assign]
    controller.compute_s, controller.load_s = 1.0, (46 + 3 * (4 + 0.5 * 42)) / (42 * 4)
    assert rig.run([order]) == set()
    assert rig.counters.totals()["blend_decisions_hidden"] == 1
    assert rig.counters.totals()["blend_tokens_chosen"] - first == 21
    assert_near(rig.kv(order.slots), rig.expected(tokens, request, Deviation("v", (1,), (0.5,)), 0.5, 46))


def test_a_question_that_is_not_in_the_step_has_deviation_choose(rig: Rig) -> None:
    rig.encode()
    tokens, request = prompt([2, 0, 1])
    rig.worker.selector, rig.worker.share = QueryAttention(1, 2), 0.15
    order = order_of(tokens, request, 45)
    assert rig.run([order]) == set()
    found = rig.kv(order.slots)
    assert rig.counters.totals()["blend_questions_missing"] == 1
    rig.worker.selector = Deviation("v", (1,), (0.15,))
    assert rig.run([order]) == set()
    assert_near(found, rig.kv(order.slots))


def test_tokens_of_the_last_document_that_are_behind_the_blend_do_not_ask(rig: Rig) -> None:
    """They are in the blend's last, unfilled block; a question of one token decides alone."""
    rig.encode()
    tokens, request = prompt([2, 0, 1])
    order = asked_order(tokens, request, 40)
    found = question_of(order)
    assert found is not None
    assert (found.first, len(found.tokens)) == (46, len(tokens))
    assert question_of(replace(order, question_slots=order.question_slots[:5])) is None


def test_what_is_local_is_not_touched_and_read(rig: Rig) -> None:
    rig.encode()
    tokens, request = prompt([2, 0, 1])
    first = order_of(tokens, request, 45)
    rig.run([first])
    wanted = rig.kv(first.slots)
    again = order_of(tokens, request, 45, num_local=20, num_exact=20)
    assert_near(rig.kv(again.slots[:20]), [(k[:20], v[:20]) for k, v in wanted])
    for layer in range(rig.layers.num_layers):
        rest = rig.rows.at(rig.rows.send(again.slots[20:]))
        k, v = rig.rows.read(layer, rest)
        rig.rows.write(layer, rest, torch.full_like(k, torch.nan), torch.full_like(v, torch.nan))
    rig.run([again])
    assert_near(rig.kv(first.slots), wanted)


def test_an_exact_prefix_is_loaded_and_not_computed(rig: Rig) -> None:
    rig.encode()
    tokens, request = prompt([2, 0, 1])
    engine = rig.bench.engine
    slots = whole_blocks(4, 3)
    states, calls = rig.layers.embed(np.array(tokens[:15])), rig.layers.calls(np.arange(15), slots)
    for layer in range(rig.layers.num_layers):
        states = rig.layers.run(layer, calls, states)
    for _ in engine.store_layer(tokens[:8], kvcaches=None, slot_mapping=slots[:8]):
        pass
    assert engine.flush()
    wanted = rig.kv(slots[:5])
    rig.bench.cache.fill(float("nan"))
    order = order_of(tokens, request, 45, num_exact=5)
    assert rig.run([order]) == set()
    assert_near(rig.kv(order.slots[:5]), wanted)
    assert rig.counters.totals()["blend_tokens_known"] == 5


def test_what_is_gone_is_computed(rig: Rig) -> None:
    tokens, request = prompt([2, 0, 1])
    order = order_of(tokens, request, 45)
    assert rig.run([order]) == set()
    assert rig.counters.totals()["blend_tokens_computed"] == 45
    assert_near(rig.kv(order.slots), rig.expected(tokens, request, AllTokens(), 1.0, 45))


def test_a_step_asks_no_lower_tier_for_a_segment() -> None:
    tier = FaultyTier("disk")
    rig = Rig(Deviation("v", (1,), (0.0,)), 0.0, tiers=[tier])
    rig.encode()
    host = rig.bench.engine.parts().storage.host
    rig.bench.engine.parts().storage.lower.settle()
    assert rig.bench.engine.flush()
    assert host.evict(host.evictable())
    tokens, request = prompt([2, 0, 1])
    order = order_of(tokens, request, 45)
    tier.calls.clear()
    assert rig.run([order]) == set()
    assert not tier.calls_of("contains")
    assert not tier.calls_of("get")
    assert rig.counters.totals()["blend_tokens_computed"] == 45
    assert_near(rig.kv(order.slots), rig.expected(tokens, request, AllTokens(), 1.0, 45))
    rig.bench.close()


def fail_loads_at(rig: Rig, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the device fail when a layer of chunks is loaded."""
    loader = rig.segments.connector.in_place
    load_layer = loader.load_layer

    def fail(load: Any, layer: int, *rest: Any) -> None:
        if layer == failing and load.plan.transfer.num_chunks:
            raise RuntimeError("the device fails")
        load_layer(load, layer, *rest)

    monkeypatch.setattr(loader, "load_layer", fail)


def test_loads_that_fail_make_the_prompts_blocks_invalid(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.encode()
    tokens, request = prompt([2, 0, 1])
    order = order_of(tokens, request, 45, num_local=5, num_exact=5)
    fail_loads_at(rig, 1, monkeypatch)
    assert rig.run([order]) == set((order.slots[5:] // BLOCK).tolist())
    stored, lost = rig.worker.take_keys()
    assert {key for part in DOCUMENTS for key in rig.segments.keys(part)} == set(stored)
    assert set(lost) <= set(stored)
    assert lost


def test_a_model_that_fails_makes_them_invalid_too(rig: Rig) -> None:
    rig.encode()
    tokens, request = prompt([2, 0, 1])
    rig.layers.fails_at = 2
    order = order_of(tokens, request, 45)
    assert rig.run([order]) == set((order.slots // BLOCK).tolist())
    assert not rig.worker.is_running
    rig.run(encodes=[EncodeOrder(np.array([1, 2, 3]), (), np.arange(6))])
    assert rig.counters.totals()["blend_failures"] == 2


def test_orders_that_no_hook_has_carried_out_make_them_invalid(rig: Rig) -> None:
    tokens, request = prompt([2, 0, 1])
    order = order_of(tokens, request, 45)
    rig.worker.begin_step([order], [])
    assert rig.worker.invalid_blocks() == set((order.slots // BLOCK).tolist())
    rig.worker.begin_step([], [])
    assert rig.worker.invalid_blocks() == set()


def test_an_order_is_carried_out_once(rig: Rig) -> None:
    rig.encode()
    tokens, request = prompt([2, 0, 1])
    rig.worker.begin_step([order_of(tokens, request, 45)], [])
    rig.worker.blend(())
    rows = rig.layers.num_rows
    rig.worker.blend(())
    rig.worker.encode()
    assert rig.layers.num_rows == rows


def in_parts(rig: Rig, order: BlendOrder, steps: int = 20) -> tuple[int, set[int]]:
    """Carry an order out beside the steps of others: how many that took, and what is to be computed again."""
    waiting = replace(order, waiting="one")
    for step in range(1, steps + 1):
        rig.worker.begin_step([waiting] if step == 1 else [], [])
        rig.worker.blend(())
        assert not rig.worker.is_running
        lost = rig.worker.lost_blocks()
        assert rig.worker.invalid_blocks() == set()
        if rig.worker.ended(()) == {"one"}:
            return step, lost
        assert not lost
    raise AssertionError(f"not ended after {steps} steps")


@pytest.mark.parametrize(
    "selector", [NoTokens(), FirstTokens(), QueryAttention(1, 2), Deviation("k", (1, 3), (0.5, 0.3))]
)
def test_a_blend_in_parts_equals_one_at_once_and_computes_no_more(selector: Selector) -> None:
    rig = Rig(selector, 0.3)
    rig.encode()
    tokens, request = prompt([2, 0, 1])
    asks = isinstance(selector, QueryAttention)
    order = (asked_order if asks else order_of)(tokens, request, 46)
    assert rig.run([order]) == set()
    wanted, rows, counted = rig.kv(order.slots), rig.layers.num_rows, rig.counters.totals()
    rig.bench.cache.fill(float("nan"))
    steps, lost = in_parts(rig, order)
    assert not lost
    # Two steps before anything is computed, and one each time that what was chosen is read back.
    reads = {QueryAttention: 1, Deviation: 2}.get(type(selector), 0)
    assert 4 + reads <= steps <= 6 + reads
    for found, other in zip(rig.kv(order.slots), wanted, strict=True):
        # The question is computed with the others, and then rounded otherwise.
        assert asks or all(map(torch.equal, found, other))
    assert_near(rig.kv(order.slots), wanted)
    again = {name: count - counted[name] for name, count in rig.counters.totals().items()}
    assert {name: again[name] for name in ("blend_tokens_chosen", "blend_tokens_reused")} == {
        name: counted[name] for name in ("blend_tokens_chosen", "blend_tokens_reused")
    }
    # The question's rows, too, which are the step's own otherwise.
    assert rig.layers.num_rows - rows <= rows + len(order.question_slots) * rig.layers.num_layers
    rig.bench.close()


@pytest.mark.parametrize("rig", [0.3], indirect=True)
def test_other_blends_and_encodings_may_come_between_two_parts(rig: Rig) -> None:
    rig.encode()
    tokens, request = prompt([2, 0, 1])
    order = order_of(tokens, request, 45)
    assert rig.run([order]) == set()
    wanted = rig.kv(order.slots)
    rig.bench.cache.fill(float("nan"))
    others, other_request = prompt([1, 0, 2])
    between = replace(order_of(others, other_request, 45), slots=np.arange(45) + 50)
    rig.worker.begin_step([replace(order, waiting="one")], [])
    rig.worker.blend(())
    ended = rig.worker.ended(())
    while not ended:
        assert rig.run([between], [EncodeOrder(np.array([9, 8, 7]), (), np.arange(6))]) == set()
        ended = rig.worker.ended(())
    assert ended == {"one"}
    assert_near(rig.kv(order.slots), wanted)


def test_a_step_that_computes_nothing_else_ends_a_blend(rig: Rig) -> None:
    rig.encode()
    tokens, request = prompt([2, 0, 1])
    order = replace(order_of(tokens, request, 45), waiting="one")
    for first_is_alone in (True, False):
        rig.worker.begin_step([order], [], is_alone=first_is_alone)
        rig.worker.blend(())
        if not first_is_alone:
            assert rig.worker.ended(()) == set()
            rig.worker.begin_step([], [], is_alone=True)
            rig.worker.blend(())
        assert rig.worker.ended(()) == {"one"}
    assert rig.counters.totals()["blend_requests"] == 2


def test_a_blend_whose_request_has_ended_is_given_up_and_holds_nothing(rig: Rig) -> None:
    rig.encode()
    tokens, request = prompt([2, 0, 1])
    order = replace(order_of(tokens, request, 45), waiting="one")
    for parts in range(5):
        rig.worker.begin_step([order], [])
        for _ in range(parts):
            rig.worker.blend(())
        assert rig.worker.ended({"two"}) == set()
        assert rig.worker.ended({"one", "two"}) == {"one"}
        assert rig.bench.engine.flush()
        assert rig.bench.engine.stats()["pins"] == 0
        rows = rig.layers.num_rows
        rig.worker.begin_step([], [])
        rig.worker.blend(())
        assert rig.layers.num_rows == rows
        assert rig.worker.lost_blocks() == rig.worker.invalid_blocks() == rig.worker.ended({"one"}) == set()
    assert "blend_requests" not in rig.counters.totals()


@pytest.mark.parametrize("selector", [QueryAttention(1, 2), Deviation("v", (1,), (0.3,))])
def test_a_blend_given_up_where_its_choice_comes_back_asks_the_device_nothing(
    selector: Selector, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(selector, 0.3)
    rig.encode()
    tokens, request = prompt([2, 0, 1])
    asks = isinstance(selector, QueryAttention)
    order = replace((asked_order if asks else order_of)(tokens, request, 46), waiting="one")
    chosen = list[Tensor]()
    read_back = rig.worker._rows.read_back

    def noted(numbers: Tensor) -> Any:
        chosen.append(numbers)
        return read_back(numbers)

    def fails(event: object) -> None:
        raise RuntimeError("the device fails")

    with monkeypatch.context() as patches:
        patches.setattr(rig.worker._rows, "read_back", noted)
        rig.worker.begin_step([order], [])
        while not chosen:
            rig.worker.blend(())
        patches.setattr(rig.rows._platform, "synchronize_event", fails)
        assert rig.worker.ended({"one"}) == {"one"}
    kept = len(rig.worker._rows._pinned)
    assert rig.run([replace(order, waiting=None)]) == set()
    assert len(rig.worker._rows._pinned) == kept, "memory of a choice that nobody read is used again"
    assert rig.bench.engine.flush()
    assert rig.bench.engine.stats()["pins"] == 0
    rig.bench.close()


def test_what_is_unfinished_is_given_up_at_the_end(rig: Rig) -> None:
    rig.encode()
    tokens, request = prompt([2, 0, 1])
    rig.worker.begin_step([replace(order_of(tokens, request, 45), waiting="one")], [])
    rig.worker.blend(())
    rig.worker.close()
    assert rig.bench.engine.flush()
    assert rig.bench.engine.stats()["pins"] == 0


def test_a_blend_in_parts_that_fails_ends_and_makes_only_its_own_blocks_wrong(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.encode()
    tokens, request = prompt([2, 0, 1])
    order = order_of(tokens, request, 45, num_local=5, num_exact=5)
    blocks = set((order.slots[5:] // BLOCK).tolist())
    rig.layers.fails_at = 2
    assert in_parts(rig, order)[1] == blocks
    rig.layers.fails_at = None
    fail_loads_at(rig, 2, monkeypatch)
    assert in_parts(rig, order)[1] == blocks
    assert rig.worker.take_keys()[1]
    assert rig.counters.totals()["blend_failures"] == 2


def test_a_blend_beside_others_computes_no_more_than_is_configured(rig: Rig) -> None:
    rig.encode()
    tokens, request = prompt([2, 0, 1])
    rig.worker.selector, rig.worker.share, rig.layers.most_gap = Deviation(), 0.15, 0
    connector, controller = rig.segments.connector, LoadingController(0.15)
    shares = Shares(0.15, controller, connector.platform, connector.device, rig.counters)
    rig.worker.controlled = ControlledShare(shares, rig.layers.num_layers, 1, 1000)
    controller.compute_s, controller.load_s = 1.0, 100.0
    in_parts(rig, order_of(tokens, request, 46))
    assert rig.counters.totals()["blend_tokens_chosen"] == round(0.15 * 42)


class TwoRanks(Ranks):
    """One of two ranks in threads of this process, which both have the whole model."""

    def __init__(self, rank: int, barrier: threading.Barrier, given: dict[int, Any]) -> None:
        super().__init__()
        self._rank, self._barrier, self._given = rank, barrier, given

    @property
    def are_several(self) -> bool:
        return True

    def total(self, scores: Tensor) -> Tensor:
        return torch.stack(self._gathered(scores)).sum(0)

    def least(self, counts: Sequence[int]) -> list[int]:
        return [min(pair) for pair in zip(*self._gathered(counts), strict=True)]

    def _gathered(self, mine: Any) -> list[Any]:
        self._given[self._rank] = mine
        self._barrier.wait(60)
        both = [self._given[0], self._given[1]]
        self._barrier.wait(60)
        return both


def two_ranks(selector: Selector, share: float) -> list[Rig]:
    barrier, given = threading.Barrier(2), dict[int, Any]()
    return [Rig(selector, share, ranks=TwoRanks(rank, barrier, given)) for rank in range(2)]


def run_both(rigs: Sequence[Rig], order: BlendOrder) -> list[set[int]]:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda rig: rig.run([order]), rigs))


@pytest.mark.parametrize("selector", [Deviation("v", (1,), (0.3,)), FirstTokens(), QueryAttention(1, 2)])
def test_ranks_compute_the_same_rows_where_one_has_lost_a_chunk(selector: Selector) -> None:
    rigs = two_ranks(selector, 0.3)
    for rig in rigs:
        rig.encode()
    host = rigs[1].bench.engine.parts().storage.host
    lost = rigs[1].segments.keys(DOCUMENTS[0])[0]
    host._order.evict_first(lost)
    assert host.evict(rigs[1].layers.num_layers)
    assert host.contains([lost]) == [False]
    tokens, request = prompt([2, 0, 1])
    order = asked_order(tokens, request, 46)
    before = [rig.layers.num_rows for rig in rigs]
    assert run_both(rigs, order) == [set(), set()]
    rows = [rig.layers.num_rows - first for rig, first in zip(rigs, before, strict=True)]
    assert rows[0] == rows[1]
    totals = [rig.counters.totals() for rig in rigs]
    for name in ("reused", "chosen", "computed"):
        assert totals[0][f"blend_tokens_{name}"] == totals[1][f"blend_tokens_{name}"]
    assert_near(rigs[0].kv(order.slots), rigs[1].kv(order.slots))
    for rig in rigs:
        rig.bench.close()


@pytest.mark.parametrize("selector", [Deviation("v", (1,), (0.3,)), QueryAttention(1, 2)])
def test_ranks_stop_behind_the_same_layers(selector: Selector) -> None:
    rigs = two_ranks(selector, 0.3)
    for rig in rigs:
        rig.encode()
    order = asked_order(*prompt([2, 0, 1]), 46)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda rig: in_parts(rig, order), rigs))
    assert found[0] == found[1]
    assert_near(rigs[0].kv(order.slots), rigs[1].kv(order.slots))
    for rig in rigs:
        rig.bench.close()


def test_ranks_compute_to_the_end_where_a_load_fails_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone says so; vLLM has the prompt computed again on both."""
    rigs = two_ranks(Deviation("v", (1,), (0.3,)), 0.3)
    for rig in rigs:
        rig.encode()
    fail_loads_at(rigs[1], 2, monkeypatch)
    tokens, request = prompt([2, 0, 1])
    order = order_of(tokens, request, 45)
    before = [rig.layers.num_rows for rig in rigs]
    assert run_both(rigs, order) == [set(), set((order.slots // BLOCK).tolist())]
    rows = [rig.layers.num_rows - first for rig, first in zip(rigs, before, strict=True)]
    assert rows[0] == rows[1]
    for rig in rigs:
        rig.bench.close()


def test_a_rank_whose_model_fails_does_not_go_on_without_the_others() -> None:
    rigs = two_ranks(NoTokens(), 0.0)
    rigs[1].layers.fails_at = 1
    order = EncodeOrder(np.array([1, 2, 3]), (), np.arange(6))
    rigs[1].worker.begin_step([], [order])
    with pytest.raises(RuntimeError, match="device fails"):
        rigs[1].worker.encode()
    for rig in rigs:
        rig.bench.close()


@pytest.mark.parametrize("selector", [NoTokens(), QueryAttention(1, 2)])
def test_a_part_ends_in_front_of_a_layer_whose_loads_are_coming(
    selector: Selector, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(selector, 0.3)
    rig.encode()
    order = asked_order(*prompt([2, 0, 1]), 46)
    asked: list[int] = []
    monkeypatch.setattr(BatchRetrieval, "is_coming", lambda _, layer: asked.append(layer))
    least, lost = in_parts(rig, order)
    assert not lost
    wanted = rig.kv(order.slots)
    assert set(asked) == set(range(rig.layers.num_layers))
    rig.bench.cache.fill(float("nan"))
    monkeypatch.setattr(BatchRetrieval, "is_coming", lambda _, layer: layer in (1, 2))
    steps, lost = in_parts(rig, order)
    assert not lost
    assert steps > least
    assert_near(rig.kv(order.slots), wanted)
    # One that is alone waits on the device.
    assert rig.run([order]) == set()
    rig.bench.close()
