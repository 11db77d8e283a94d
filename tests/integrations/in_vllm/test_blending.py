"""Blending in a real vLLM: documents in any order, beside requests that must not notice."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import BLOCK, CHUNK, Answer, Engine, assert_same, prompt, started, with_lwkv
from torch.utils._python_dispatch import TorchDispatchMode

from lwkv.blend import Blender, BlendRequest, Deviation, FirstTokens, NoTokens, QueryAttention, Selector
from lwkv.blend.forward.attention import attend_paged
from lwkv.blend.share.batch_shares import Shares
from lwkv.blend.share.controller import LoadingController
from lwkv.config.settings import Config
from lwkv.integrations.vllm.blending.model.calls import States
from lwkv.integrations.vllm.blending.model.row_attention import RowAttentions, is_plain
from lwkv.integrations.vllm.blending.worker.share import ControlledShare
from lwkv.reference import PagedCache, load_hf_folder, open_cache_engine
from lwkv.reference.blending import ReferenceBlend

PREFIX = [401, 402, 403, 404, 405]
HEAD, GAP = [7, 8, 9], [3]


class Documents:
    """A prompt of documents between a head and a question, and where they are."""

    def __init__(
        self, documents: Sequence[list[int]], question: list[int], head: Sequence[int] = HEAD
    ) -> None:
        self.ids, self.segments = list(head), []
        for document in documents:
            self.segments.append([len(self.ids), len(self.ids) + len(document)])
            self.ids += [*document, *GAP]
        self.ids += question


def documents(seed: int, *lengths: int) -> list[list[int]]:
    return [prompt(1000 * seed + number, length) for number, length in enumerate(lengths)]


def ask(engine: Engine, prompts: Sequence[Documents], max_tokens: int = 8) -> list[Answer]:
    """Answer prompts in one batch, which may be blended."""
    return engine.ask_with(
        [one.ids for one in prompts],
        [{"kv_transfer_params": {"lwkv_segments": one.segments}} for one in prompts],
        max_tokens,
    )


def encode(engine: Engine, parts: Sequence[list[int]]) -> None:
    """Have documents cached, as the first prompt does that has them."""
    ask(engine, [Documents(parts, prompt(99, 40))], 1)
    settle(engine)


def settle(engine: Engine) -> None:
    """Have the scheduler know what is in host memory."""
    assert engine.flush()
    engine.ask([prompt(98, 5)], 1)


def blends_at_rest(engine: Engine) -> None:
    """Check that nothing is held, and that the scheduler follows no prompt any more."""
    settle(engine)
    engine.at_rest()
    assert len(engine.scheduler.blending) == 0


def compute_again(engine: Engine, share: float) -> None:
    """Choose another share of the reused tokens than the engine was started with."""
    choose(engine, Deviation("v", (1,), (share,)), share)


def choose(engine: Engine, selector: Selector, share: float) -> None:
    """Choose the tokens that are computed again in another way than the engine was started with."""
    blending = engine.worker._blending
    blending.selector, blending.share, blending.controlled = selector, share, None


def count(engine: Engine, name: str) -> int:
    return int(engine.worker.engine.stats().get(f"blend_{name}", 0))


def blending(**settings: Any) -> dict[str, Any]:
    """Engine arguments."""
    return with_lwkv(enable_blending=True, blend_shared_prefix=PREFIX, blend_min_tokens=64, **settings)


@pytest.fixture(scope="module")
def shared(llama: Path) -> Iterator[Engine]:
    settings = blending(blend_selector="query", blend_recompute_ratios=1.0) | {"max_num_batched_tokens": 1024}
    with started(llama, enable_prefix_caching=True, **settings) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    compute_again(shared, 1.0)
    yield shared
    blends_at_rest(shared)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_blend_that_computes_all_tokens_again_gives_vllms_own_answer(
    engine: Engine, plain: Elsewhere, order: tuple[int, ...]
) -> None:
    parts = documents(1, 100, 150, 77)
    encode(engine, parts)
    asked = Documents([parts[number] for number in order], prompt(6 + order[0], 33), [11, 12, 13, 14])
    before = count(engine, "tokens_reused")
    assert_same(ask(engine, [asked]), plain.ask([asked.ids]))
    # All of the documents but what stands behind the last block that they fill.
    assert count(engine, "tokens_reused") - before > 327 - BLOCK


def test_without_tokens_computed_again_it_equals_plain_reuse(
    engine: Engine, llama: Path, plain: Elsewhere
) -> None:
    parts = documents(2, 90, 64, 71)
    encode(engine, parts)
    head = prompt(21, 8 * BLOCK - 225 - 2)  # so that the last document ends with a block
    asked = Documents([parts[1], parts[2], parts[0]], prompt(22, 30), head)
    compute_again(engine, 0.0)
    (found,) = ask(engine, [asked], 1)
    wanted = blended_elsewhere(llama, parts, asked, NoTokens(), 0.0)
    token = found.tokens[0]
    assert token == int(wanted.argmax())
    assert abs(found.logprobs[0] - float(wanted[token])) < 1e-3
    assert plain.ask([asked.ids], 1)[0].logprobs[0] != pytest.approx(found.logprobs[0], abs=1e-3)


def test_rows_that_lwkv_attends_to_give_what_vllms_own_attention_gives(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on devices with a kernel for rows that stand far apart; here in torch, for every call."""
    parts = documents(11, 90, 104, 71)
    encode(engine, parts)
    compute_again(engine, 0.3)
    asked = Documents([parts[1], parts[2], parts[0]], prompt(111, 30))
    wanted = ask(engine, [asked])
    layers, num_calls = engine.worker._blending._layers, 0

    def attend(*tensors: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        attend_paged(*tensors)

    known = layers._config.compilation_config.static_forward_context
    modules = [known[name] for name in layers._names]
    assert all(map(is_plain, modules))
    own = [module.impl for module in modules]
    by_rows = RowAttentions(modules, engine.worker.engine.connector.layers, attend)
    monkeypatch.setattr(layers, "row_attentions", by_rows)
    monkeypatch.setattr("lwkv.integrations.vllm.blending.model.row_attention.FEWEST_RUNS", 1)
    monkeypatch.setattr("lwkv.integrations.vllm.blending.model.row_attention.ROWS_OF_A_RUN", 1000)
    engine.forget()
    assert_same(ask(engine, [asked]), wanted)
    assert num_calls == layers.num_layers
    assert [module.impl for module in modules] == own


@pytest.mark.parametrize(
    "selector",
    [
        FirstTokens(),
        QueryAttention.of(4),
        QueryAttention(0, 3),
        Deviation("v", (1,), (0.2,)),
        Deviation("k", (1, 3), (0.5, 0.2)),
    ],
)
def test_what_is_chosen_is_lwkvs_own_choice(
    engine: Engine, llama: Path, selector: Selector, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No others are computed with them.
    monkeypatch.setattr(engine.worker._blending._layers, "most_gap", 0)
    parts = documents(13, 90, 64, 71)
    encode(engine, parts)
    head = prompt(131, 8 * BLOCK - 225 - 2)  # so that the last document ends with a block
    asked = Documents([parts[1], parts[2], parts[0]], prompt(132, 30), head)
    choose(engine, selector, 0.2)
    before = count(engine, "tokens_chosen")
    (found,) = ask(engine, [asked], 1)
    assert count(engine, "tokens_chosen") - before == 45
    wanted = blended_elsewhere(llama, parts, asked, selector, 0.2)
    plain_reuse = blended_elsewhere(llama, parts, asked, NoTokens(), 0.0)
    token = found.tokens[0]
    assert token == int(wanted.argmax())
    assert abs(found.logprobs[0] - float(wanted[token])) < 1e-3
    assert abs(found.logprobs[0] - float(plain_reuse[token])) > 1e-3


def test_the_controller_learns_from_blends_and_never_computes_fewer_than_is_configured(
    engine: Engine, plain: Elsewhere
) -> None:
    parts = documents(15, 90, 64, 71)
    encode(engine, parts)
    connector, controller = engine.worker.engine.connector, LoadingController(1.0)
    counters = engine.worker.engine.parts().counters
    shares = Shares(1.0, controller, connector.platform, connector.device, counters)
    compute_again(engine, 1.0)
    engine.worker._blending.controlled = ControlledShare(shares, 4, 1, 1024)
    before = {name: count(engine, name) for name in ("requests", "tokens_chosen")}
    for turn in range(3):
        asked = Documents(parts, prompt(150 + turn, 30), prompt(160 + turn, 7))
        assert_same(ask(engine, [asked]), plain.ask([asked.ids]))
    assert count(engine, "requests") - before["requests"] == 3
    assert count(engine, "tokens_chosen") - before["tokens_chosen"] > 3 * (225 - 2 * BLOCK)
    assert controller.compute_s
    assert controller.load_s


def test_a_question_that_is_cut_has_deviation_choose(engine: Engine) -> None:
    """The step has room for a part of it only."""
    parts = documents(14, 90, 64)
    encode(engine, parts)
    choose(engine, QueryAttention.of(4), 0.2)
    before = count(engine, "questions_missing")
    ask(engine, [Documents(parts[::-1], prompt(141, 1100))], 1)
    assert count(engine, "questions_missing") - before == 1


def blended_elsewhere(
    llama: Path, parts: Sequence[list[int]], asked: Documents, selector: Selector, share: float
) -> Any:
    """Log-probabilities of lwkv's own engine, float32 (vocab,)."""
    model = load_hf_folder(llama)
    cache = PagedCache(model.shape, num_blocks=80, block_size=16)
    settings = {"use_layerwise": True, "enable_blending": True, "blend_min_tokens": 0, "chunk_size": CHUNK}
    with open_cache_engine(Config(max_local_cpu_size=0.1, **settings), model, cache, "tiny") as engine:
        blender = Blender(engine, ReferenceBlend(model), shared_prefix=PREFIX, selector=selector, share=share)
        for part in parts:
            blender.encode(part, np.arange(blender.num_encoded(len(part))))
        assert engine.flush()
        slots = np.arange(len(asked.ids))
        segments = [(start, end) for start, end in asked.segments]
        (blended,) = blender.prefill([BlendRequest(asked.ids, slots, segments)])
        return blended.logits.log_softmax(-1)


def test_the_same_prompt_asked_exactly_afterwards_finds_nothing_blended(
    engine: Engine, plain: Elsewhere
) -> None:
    parts = documents(3, 130, 101)
    encode(engine, parts)
    compute_again(engine, 0.0)
    asked = Documents([parts[1], parts[0]], prompt(31, 70), prompt(32, 40))
    (blended,) = ask(engine, [asked], 40)
    settle(engine)
    exact = plain.ask([asked.ids, asked.ids[:-3]], 40)
    assert blended.logprobs != exact[0].logprobs
    assert_same(engine.ask([asked.ids, asked.ids[:-3]], 40), exact)
    # What it generated, too, would be found by who goes on with it.
    longer = [*asked.ids, *blended.tokens, *prompt(33, 20)]
    assert_same(engine.ask([longer]), plain.ask([longer]))
    engine.forget()
    assert_same(engine.ask([longer]), plain.ask([longer]))


def test_the_exact_prefix_in_front_is_not_computed(engine: Engine, plain: Elsewhere) -> None:
    """From vLLM's own cache, and from lwkv."""
    parts = documents(4, 120, 90)
    encode(engine, parts)
    head = prompt(41, 3 * CHUNK)
    engine.ask([[*head, 501]])
    settle(engine)
    for number, forgets in enumerate((False, True)):
        if forgets:
            engine.forget()
        known = count(engine, "tokens_known")
        asked = Documents([parts[1], parts[0]], prompt(42 + number, 25), head)
        assert_same(ask(engine, [asked]), plain.ask([asked.ids]))
        assert count(engine, "tokens_known") - known == 3 * CHUNK


def test_what_was_evicted_meanwhile_is_computed(engine: Engine, plain: Elsewhere) -> None:
    """The scheduler has not heard of it."""
    parts = documents(5, 120, 90)
    encode(engine, parts)
    compute_again(engine, 0.0)
    asked = Documents([parts[1], parts[0]], prompt(51, 25))
    engine.evict_all()
    computed = count(engine, "tokens_computed")
    assert_same(ask(engine, [asked]), plain.ask([asked.ids]))
    assert count(engine, "tokens_computed") - computed > 180


def test_a_load_that_fails_has_vllm_compute_the_prompt(
    engine: Engine, plain: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = documents(6, 120, 90)
    encode(engine, parts)
    compute_again(engine, 0.0)
    loader = engine.worker.engine.connector.in_place
    load_layer = loader.load_layer
    failed = []

    def fail_once(load: Any, layer: int, *rest: Any) -> None:
        if layer == 2 and not failed:
            failed.append(layer)
            raise RuntimeError("the device fails")
        load_layer(load, layer, *rest)

    monkeypatch.setattr(loader, "load_layer", fail_once)
    asked = Documents([parts[1], parts[0]], prompt(61, 25))
    beside = prompt(62, 200)
    answers = ask(engine, [asked, Documents([], beside, [])])
    assert failed
    assert count(engine, "failures")
    assert_same(answers, plain.ask([asked.ids, beside]))


def test_nothing_is_stored_that_was_computed_beside_a_blend_that_failed(
    engine: Engine, plain: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the same exact prefix, which was to be loaded for the blend, and never came."""
    parts = documents(10, 120, 90)
    encode(engine, parts)
    head = prompt(101, 3 * CHUNK)
    engine.ask([[*head, 501]])
    settle(engine)
    engine.forget()
    loader = engine.worker.engine.connector.in_place
    load_layer = loader.load_layer
    failed = []

    def fail_once(load: Any, layer: int, *rest: Any) -> None:
        if not failed:
            failed.append(layer)
            raise RuntimeError("the device fails")
        load_layer(load, layer, *rest)

    monkeypatch.setattr(loader, "load_layer", fail_once)
    asked = Documents(parts[::-1], prompt(102, 25), head)
    beside = Documents([], prompt(103, 3 * CHUNK), head)
    ask(engine, [asked, beside])
    assert failed
    settle(engine)
    for _ in range(2):
        engine.forget()
        assert_same(engine.ask([beside.ids, asked.ids]), plain.ask([beside.ids, asked.ids]))
        settle(engine)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lwkv_segments": [[0, 70], [60, 90]]},
        {"lwkv_segments": "0-70"},
        {"lwkv_segments": [[n, n + 1] for n in range(1, 600)]},
    ],
    ids=["overlapping", "range", "many"],
)
def test_parameters_that_a_client_gets_wrong_stop_nobody(
    engine: Engine, plain: Elsewhere, wrong: Any
) -> None:
    asked = prompt(111, 620)
    assert_same(engine.ask_with([asked], [{"kv_transfer_params": wrong}]), plain.ask([asked]))


def test_a_cache_salt_keeps_documents_and_prefixes_apart(engine: Engine, plain: Elsewhere) -> None:
    """With none computed again, a blend cannot be taken for the exact answer."""
    parts = documents(12, 120, 90)
    encode(engine, parts)
    compute_again(engine, 0.0)
    asked = Documents(parts[::-1], prompt(121, 25))
    (blended,) = ask(engine, [asked])
    settle(engine)
    wanted = plain.ask([asked.ids])
    assert blended.logprobs != wanted[0].logprobs
    assert_same(engine.ask([asked.ids], salt="another"), wanted)
    assert_same(engine.ask([asked.ids]), wanted)


def test_prompts_with_a_new_prefix_in_common_are_right_in_one_batch(engine: Engine, plain: Elsewhere) -> None:
    """vLLM gives the second one blocks that the first one has not computed yet."""
    parts = documents(7, 70, 66)
    encode(engine, parts)
    head = prompt(71, 130)
    asked = [Documents(parts, prompt(72, 30), head), Documents(parts[::-1], prompt(73, 30), head)]
    first = Documents([], prompt(74, 30), head)
    answers = ask(engine, [first, *asked])
    assert_same(answers, plain.ask([first.ids, *(one.ids for one in asked)]))


def test_aborted_and_preempted_prompts_leave_nothing_behind(engine: Engine, plain: Elsewhere) -> None:
    parts = documents(8, 70, 66)
    encode(engine, parts)
    asked = Documents(parts[::-1], prompt(82, 30))
    for steps in (1, 2):
        engine.abort(asked.ids, steps, {"kv_transfer_params": {"lwkv_segments": asked.segments}})
    assert_same(ask(engine, [asked]), plain.ask([asked.ids]))


def test_requests_beside_blends_equal_an_engine_without_lwkv(engine: Engine, plain: Elsewhere) -> None:
    """Blended ones too, where all tokens are computed again."""
    drawn = random.Random(9)
    known = [prompt(900 + number, drawn.randrange(20, 260)) for number in range(8)]
    heads = [prompt(950 + number, drawn.randrange(4, 200)) for number in range(3)]
    for turn in range(25):
        share = drawn.choice([0.0, 0.3, 1.0])
        compute_again(engine, share)
        asked, is_exact = [], []
        for number in range(drawn.randrange(1, 5)):
            parts = drawn.sample(known, drawn.randrange(1, 4))
            one = Documents(parts, prompt(turn * 10 + number, drawn.randrange(1, 60)), drawn.choice(heads))
            if drawn.random() < 0.5:
                one.segments = []
            asked.append(one)
            is_exact.append(share == 1.0 or not one.segments)
        if drawn.random() < 0.2:
            engine.forget()
        if drawn.random() < 0.2:
            engine.evict_all()
        answers = ask(engine, asked, drawn.choice([1, 8]))
        max_tokens = len(answers[0].tokens)
        exact = [number for number, same in enumerate(is_exact) if same]
        wanted = plain.ask([asked[number].ids for number in exact], max_tokens)
        assert_same([answers[number] for number in exact], wanted)
    assert count(engine, "requests") > 10


def test_a_layer_takes_the_host_few_calls_and_the_same_kernels(engine: Engine) -> None:
    """What it does between kernels is what the host is busy with where rows are few."""
    layers = engine.worker._blending._layers
    assert all(layers.flat)
    found = []
    with torch.inference_mode(), layers.eagerly():
        # vLLM's null block, which nobody reads.
        calls = layers.calls(np.arange(5), np.arange(BLOCK))
        first = layers.run(0, calls, layers.embed(np.arange(3, 8)))
        for run in (layers.run_modules, layers.run):
            states = States(first.hidden.clone(), first.residual.clone())
            kernels, python = Kernels(), list[str]()
            with kernels:
                run(1, calls, States(first.hidden.clone(), first.residual.clone()))
            sys.setprofile(lambda frame, event, _, seen=python: event == "call" and seen.append(frame.f_code))
            try:
                states = run(1, calls, states)
            finally:
                sys.setprofile(None)
            found.append((states, kernels.names, len(python)))
    (wanted, own, most), (states, names, least) = found
    assert torch.equal(states.hidden, wanted.hidden)
    assert torch.equal(states.residual, wanted.residual)
    assert names == own
    assert least <= 0.75 * most, f"{least} calls of Python's, and {most} with all modules"


class Kernels(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
