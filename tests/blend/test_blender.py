"""Blended prompts against models that are written down plainly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from blend.conftest import CHUNK, DOCUMENTS, HEAD, QUESTION, SHARED, Bench, host, prompt
from torch import Tensor

from lwkv.blend import (
    AllTokens,
    Blender,
    BlendRequest,
    Deviation,
    FirstTokens,
    NoTokens,
    QueryAttention,
    RandomTokens,
)
from lwkv.blend.shared_prefix import DEFAULT_TEXT
from lwkv.errors import ConfigError, RequestError
from lwkv.reference import LAYOUTS, Model, ModelShape, RopeScaling, inverse_frequencies, random_model
from lwkv.reference.blending import ReferenceBlend
from lwkv.reference.model.rope import rotate

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "tied_embeddings": True},
    "partly rotated": {"rotary_fraction": 0.4},
    "llama3 scaling": {"rope_scaling": RopeScaling("llama3", 8.0, 16)},
    "yarn": {"rope_scaling": RopeScaling("yarn", 4.0, 16)},
    "linear scaling": {"rope_scaling": RopeScaling("linear", 2.0)},
}
EXACT = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "selector", [AllTokens(), Deviation(), Deviation("k", (1, 2), (1.0, 1.0)), QueryAttention(1, 2)], ids=str
)
def test_all_tokens_computed_equal_a_full_prefill(
    selector: Any, layout: str, shape: ModelShape, device: torch.device
) -> None:
    bench = Bench(shape, device, layout)
    blender = bench.blender(selector, share=1.0)
    bench.encode(blender)
    tokens, request = prompt([2, 0, 1])
    (found,) = blender.prefill([request])
    assert (found.num_reused, found.num_chosen) == (42, 42)
    torch.testing.assert_close(found.logits.cpu(), bench.full(tokens), **EXACT)
    bench.close()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("count", [0, 1, 4])
def test_blends_equal_a_dense_reference_with_exact_positions(
    count: int, variant: str, shape: ModelShape, device: torch.device
) -> None:
    bench = Bench(replace(shape, **VARIANTS[variant]), device)
    blender = bench.blender(FirstTokens(count), share=0.1)
    bench.encode(blender)
    tokens, request = prompt([2, 0, 1])
    (found,) = blender.prefill([request])
    torch.testing.assert_close(found.logits.cpu(), _dense(bench, blender, tokens, request, count), **EXACT)
    bench.close()


def _dense(bench: Bench, blender: Any, tokens: list[int], request: BlendRequest, count: int) -> torch.Tensor:
    reused, kept = {}, set()
    for start, end in request.segments:
        reused[start] = bench.alone(blender, tokens[start:end])
        kept |= set(range(start + count, end))
    computed = [i for i in range(len(tokens)) if i not in kept]
    return bench.dense.blend(tokens, computed, reused).float()


def test_a_share_of_nothing_is_plain_reuse_for_every_selector(bench: Bench) -> None:
    bench.encode(bench.blender())
    _, request = prompt([1, 2, 0])
    found = [
        host(bench.blender(selector, share=0.0).prefill([request]))[0]
        for selector in (NoTokens(), Deviation(), QueryAttention(1, 2), RandomTokens(), FirstTokens())
    ]
    assert all(torch.equal(one, found[0]) for one in found)
    tokens, _ = prompt([1, 2, 0])
    wanted = _dense(bench, bench.blender(), tokens, request, 0)
    torch.testing.assert_close(found[0], wanted, **EXACT)


def test_a_segment_at_the_beginning_equals_a_prefix_hit_exactly(bench: Bench) -> None:
    document = DOCUMENTS[2][: 2 * CHUNK]
    tokens = [*document, *QUESTION]
    slots = np.arange(len(tokens))
    plain = bench.blender(shared_prefix=())
    plain.encode(document, np.arange(40, 40 + len(document)))
    assert bench.engine.flush()
    bench.cache.fill(float("nan"))
    (by_segment,) = plain.prefill([BlendRequest(tokens, slots, [(0, len(document))])])
    bench.engine.store(document, slot_mapping=slots[: len(document)])
    assert bench.engine.flush()
    bench.cache.fill(float("nan"))
    (by_prefix,) = plain.prefill([BlendRequest(tokens, slots)])
    assert (by_segment.num_known, by_prefix.num_known) == (len(document), len(document))
    assert torch.equal(by_segment.logits, by_prefix.logits)
    torch.testing.assert_close(by_prefix.logits.cpu(), bench.full(tokens), **EXACT)


def test_what_stands_first_is_computed_where_others_stood_behind_the_shared_prefix(bench: Bench) -> None:
    blender = bench.blender(NoTokens(), share=0.0)
    bench.encode(blender)
    tokens, request = prompt([2, 0, 1], head=())
    assert blender.missing(tokens, request.segments) == []
    (found,) = blender.prefill([request])
    assert (found.num_known, found.num_reused) == (0, len(DOCUMENTS[0]) + len(DOCUMENTS[1]))
    wanted = _dense(bench, blender, tokens, replace(request, segments=request.segments[1:]), 0)
    torch.testing.assert_close(found.logits.cpu(), wanted, **EXACT)


def test_prompts_of_a_batch_equal_each_alone(bench: Bench) -> None:
    blender = bench.blender(Deviation("v", (1, 2), (0.4, 0.2)), share=0.2)
    bench.encode(blender, DOCUMENTS[:2])
    prompts = [prompt([2, 0, 1]), prompt([1]), prompt([2]), prompt([])]
    parts = np.split(np.random.default_rng(5).permutation(300), 4)
    requests = [
        replace(request, slot_mapping=part[: len(tokens)])
        for (tokens, request), part in zip(prompts, parts, strict=True)
    ]
    together = blender.prefill(requests)
    assert [one.num_reused for one in together] == [21, 8, 0, 0]
    for found, request in zip(together, requests, strict=True):
        bench.cache.fill(float("nan"))
        (alone,) = blender.prefill([request])
        torch.testing.assert_close(found.logits, alone.logits, **EXACT)
        assert replace(found, logits=None) == replace(alone, logits=None)


def test_what_is_not_cached_is_computed_and_takes_nothing_of_the_budget(bench: Bench) -> None:
    blender = bench.blender(share=0.25)
    bench.encode(blender, DOCUMENTS[1:2])
    tokens, request = prompt([0, 1, 2])
    (found,) = blender.prefill([request])
    assert (found.num_reused, found.num_chosen, found.num_computed) == (8, 2, len(tokens) - 8)
    assert blender.missing(tokens, request.segments) == [request.segments[0], request.segments[2]]
    bench.encode(blender, [DOCUMENTS[0], DOCUMENTS[2]])
    (found,) = blender.prefill([request])
    assert (found.num_reused, found.num_chosen, found.num_computed) == (42, 10, len(tokens) - 42)
    assert blender.missing(tokens, request.segments) == []


def test_a_prefix_hit_in_front_is_exact_and_never_computed(bench: Bench) -> None:
    blender = bench.blender(NoTokens(), share=0.0)
    head = list(range(30, 41))
    tokens, request = prompt([1, 0], head=head)
    bench.encode(blender)
    slots = np.arange(CHUNK * 2)
    blender.prefill([BlendRequest(tokens[: CHUNK * 2], slots)])
    bench.engine.store(tokens[: CHUNK * 2], slot_mapping=slots)
    assert bench.engine.flush()
    bench.cache.fill(float("nan"))
    (found,) = blender.prefill([request])
    # The prefix ends inside the first segment: what it covers of that is exact.
    assert found.num_known == CHUNK * 2
    assert found.num_reused == 11 + 8 - CHUNK * 2 + 13
    reused = {0: bench.dense.alone(tokens[: CHUNK * 2], 0)}
    for start, end in request.segments:
        kv = bench.alone(blender, tokens[start:end])
        drop = max(0, CHUNK * 2 - start)
        reused[start + drop] = [tuple([head[drop:] for head in part] for part in layer) for layer in kv]
    computed = [i for i in range(CHUNK * 2, len(tokens)) if not any(a <= i < b for a, b in request.segments)]
    torch.testing.assert_close(
        found.logits.cpu(), bench.dense.blend(tokens, computed, reused).float(), **EXACT
    )


def test_tokens_that_the_engine_has_itself_are_neither_loaded_nor_computed(bench: Bench) -> None:
    blender = bench.blender(AllTokens(), share=1.0)
    bench.encode(blender)
    tokens, request = prompt([0, 1])
    blender.prefill([BlendRequest(tokens[:7], request.slot_mapping[:7])])
    (found,) = blender.prefill([replace(request, num_local=7)])
    assert found.num_known == 7
    assert found.num_reused == 13 - 5 + 8
    torch.testing.assert_close(found.logits.cpu(), bench.full(tokens), **EXACT)


def test_a_prompt_that_ends_with_a_segment_computes_its_last_token(bench: Bench) -> None:
    blender = bench.blender(AllTokens(), share=1.0)
    bench.encode(blender)
    tokens = [*HEAD, *DOCUMENTS[0]]
    (found,) = blender.prefill([BlendRequest(tokens, np.arange(len(tokens)), [(2, len(tokens))])])
    assert (found.num_reused, found.num_computed) == (12, 3)
    torch.testing.assert_close(found.logits.cpu(), bench.full(tokens), **EXACT)


def test_segments_are_found_by_content_and_shared_prefix_alone(bench: Bench) -> None:
    blender = bench.blender()
    bench.encode(blender, DOCUMENTS[:1])
    tokens, request = prompt([0])
    assert blender.missing(tokens, request.segments) == []
    assert blender.missing(tokens, request.segments, ("lora",)) == [request.segments[0]]
    assert bench.blender(shared_prefix=SHARED[:2]).missing(tokens, request.segments) == [request.segments[0]]
    assert bench.engine.lookup(DOCUMENTS[0]) == 0
    assert bench.engine.lookup([*SHARED, *DOCUMENTS[0]]) == 0


class Interleaved(ReferenceBlend):
    """The same model with the elements of its heads in another order, in which RoPE turns neighbours."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.rope = replace(self.rope, interleaved=True)
        half = len(self.rope.frequencies)
        turned = [i + half * part for i in range(half) for part in range(2)]
        self._order = torch.tensor([*turned, *range(2 * half, model.shape.head_size)])

    def project(self, layer: int, hidden: Tensor, angles: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(layer, hidden, angles)
        order = self._order.to(q.device)
        return q[..., order], k[..., order], v


@pytest.mark.parametrize("fraction", [1.0, 0.4])
def test_heads_that_turn_neighbouring_elements_blend_to_the_same(
    fraction: float, shape: ModelShape, device: torch.device
) -> None:
    bench = Bench(replace(shape, rotary_fraction=fraction), device)
    model = Interleaved(bench.model)
    blender = Blender(bench.engine, model, shared_prefix=SHARED, selector=FirstTokens(2), share=0.1)
    bench.encode(blender)
    tokens, request = prompt([2, 0, 1])
    (found,) = blender.prefill([request])
    torch.testing.assert_close(found.logits.cpu(), _dense(bench, blender, tokens, request, 2), **EXACT)
    bench.close()


def test_loads_that_are_as_late_as_can_be_change_nothing(bench: Bench) -> None:
    blender = bench.blender(Deviation("v", (1, 2), (0.4, 0.2)), share=0.2)
    bench.encode(blender)
    _, request = prompt([2, 0, 1])
    (wanted,) = blender.prefill([request])
    bench.cache.fill(float("nan"))
    lane = blender.segments.connector.loader.lane
    for stream in (lane.copies, lane.kernels):
        if hasattr(stream, "late"):
            stream.late = True
    (found,) = blender.prefill([request])
    assert torch.equal(found.logits, wanted.logits)


def test_a_keys_turn_and_its_way_back_leave_it_as_it_was(bench: Bench) -> None:
    """A document moves there and back: as a segment of a prompt, and out of that prompt at its old place."""
    document = DOCUMENTS[0]
    blender = bench.blender(NoTokens(), share=0.0, shared_prefix=())
    bench.encode(blender, [document])
    near, far = np.arange(len(document) + 1), np.arange(100, 160)
    rows = blender._rows.at(torch.from_numpy(far[30 : 30 + len(document)]).to(bench.model.device))
    (_,) = blender.prefill([BlendRequest([*range(30), *document, 7], far[: 31 + len(document)], [(30, 43)])])
    moved = [blender._rows.read(layer, rows)[0] for layer in range(bench.shape.num_layers)]
    (_,) = blender.prefill([BlendRequest([*document, 7], near, [(0, len(document))])])
    rows = blender._rows.at(torch.from_numpy(near[:-1]).to(bench.model.device))
    kept = [blender._rows.read(layer, rows)[0] for layer in range(bench.shape.num_layers)]
    back = _angles(bench, -30, len(document))
    for there, here in zip(moved, kept, strict=True):
        torch.testing.assert_close(rotate(there, *back), here, rtol=0, atol=1e-5)


def _angles(bench: Bench, shift: int, count: int) -> tuple[Tensor, Tensor]:
    angles = (shift * inverse_frequencies(bench.shape)).expand(count, -1)
    return angles.cos().float().to(bench.model.device), angles.sin().float().to(bench.model.device)


@pytest.mark.parametrize("other", [{"num_layers": 3}, {"num_kv_heads": 3}, {"head_size": 8}], ids=str)
def test_a_cache_of_another_model_is_refused(
    other: dict[str, int], bench: Bench, device: torch.device
) -> None:
    model = random_model(replace(bench.shape, **other), device=device)
    with pytest.raises(ConfigError, match=r"the model's KV is \(.*the cache's \(4, 2, 10, torch.float32\)"):
        Blender(bench.engine, ReferenceBlend(model), shared_prefix=())


def test_a_cache_in_another_dtype_is_refused(bench: Bench, device: torch.device) -> None:
    model = random_model(bench.shape, device=device, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="in the dtype it computes in"):
        Blender(bench.engine, ReferenceBlend(model), shared_prefix=())


@pytest.mark.parametrize("share", [15, -0.5, float("nan"), float("inf")])
def test_a_share_that_is_no_part_is_refused(share: float, bench: Bench) -> None:
    with pytest.raises(ConfigError, match=rf"share: got {share}; allowed: from 0 for none to 1 for all"):
        bench.blender(share=share)


def test_an_engine_without_the_buffer_is_refused(shape: ModelShape, device: torch.device) -> None:
    bench = Bench(shape, device, enable_blending=False)
    with pytest.raises(ConfigError, match="set enable_blending and use_layerwise"):
        bench.blender()
    bench.close()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tokens": []}, "without a token"),
        ({"slot_mapping": [3] * 27}, "slot 3 is given to two tokens"),
        ({"slot_mapping": [-1, *range(26)]}, "every token of a prompt that is blended needs a slot"),
        ({"slot_mapping": range(280, 307)}, "out of range"),
        ({"num_local": 27}, "num_local is 27; allowed: 0 to 26"),
        ({"segments": [(3, 3)]}, "no part of 27 tokens"),
        ({"segments": [(0, 28)]}, "no part of 27 tokens"),
        ({"segments": [(5, 9), (8, 12)]}, "overlap or are out of order"),
        ({"segments": [(0, 5, 9)]}, r"segment \(0, 5, 9\) is no pair of whole numbers"),
        ({"segments": [(0.0, 5.0)]}, r"segment \(0.0, 5.0\) is no pair"),
        ({"segments": [(True, 5)]}, r"segment \(True, 5\) is no pair"),
        ({"segments": [3]}, "segment 3 is no pair"),
        ({"segments": 3}, "segments are 3; give a list"),
        ({"salts": "lora"}, "salts: got 'lora'"),
    ],
)
def test_requests_that_do_not_fit_are_refused(change: dict[str, Any], text: str, bench: Bench) -> None:
    if change.get("tokens") == []:
        change = {**change, "slot_mapping": []}
    request = replace(BlendRequest(list(range(27)), np.arange(27)), **change)
    with pytest.raises(RequestError, match=text):
        bench.blender().prefill([request])


def test_prompts_of_a_batch_may_share_no_slot(bench: Bench) -> None:
    request = BlendRequest([1, 2, 3], [4, 5, 6])
    with pytest.raises(RequestError, match="two prompts of a batch write to the same slot"):
        bench.blender().prefill([request, replace(request, slot_mapping=[6, 7, 8])])
    assert bench.blender().prefill([]) == []


def test_no_prompt_of_a_batch_writes_where_another_has_its_local_tokens(bench: Bench) -> None:
    blender = bench.blender()
    blender.prefill([BlendRequest([1, 2], [4, 5])])
    local = BlendRequest([1, 2, 3], [4, 5, 6], num_local=2)
    with pytest.raises(RequestError, match="local to another one"):
        blender.prefill([local, BlendRequest([7, 8], [20, 5])])
    blender.prefill([local, replace(local, slot_mapping=[4, 5, 7])])


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_a_shared_prefix_is_the_same_whatever_it_came_in(make: Any, bench: Bench) -> None:
    bench.encode(bench.blender(), DOCUMENTS[:1])
    tokens, request = prompt([0])
    assert bench.blender(shared_prefix=make(SHARED)).missing(tokens, request.segments) == []


def test_segments_are_computed_behind_what_a_tokenizer_makes_of_the_default_text(bench: Bench) -> None:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return [*SHARED] if text == DEFAULT_TEXT else []

    blender = bench.blender(shared_prefix=encode)
    assert DEFAULT_TEXT in asked
    assert blender.num_encoded(5) == 5 + len(SHARED)
    bench.encode(blender, DOCUMENTS[:1])
    tokens, request = prompt([0])
    assert bench.blender().missing(tokens, request.segments) == []


def test_a_default_text_begins_as_texts_begin_and_does_not_end(bench: Bench) -> None:
    def encode(text: str) -> list[int]:
        return [1, *(3 + ord(character) % 80 for character in text), 2]

    found = bench.blender(shared_prefix=encode).segments.shared_prefix
    assert found == tuple(encode(DEFAULT_TEXT)[:-1])


def test_blenders_without_a_shared_prefix_are_refused_unless_it_is_said(bench: Bench) -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer's encode, .* ids of your own, .* or \(\) for none"):
        Blender(bench.engine, ReferenceBlend(bench.model))
    assert bench.blender(shared_prefix=()).num_encoded(5) == 5


@pytest.mark.parametrize("chunk_size", [CHUNK, 64])
def test_a_prefix_that_ends_in_an_unfull_chunk_is_loaded_to_its_end(
    chunk_size: int, shape: ModelShape, device: torch.device
) -> None:
    bench = Bench(shape, device, save_unfull_chunk=True, chunk_size=chunk_size)
    blender = bench.blender(NoTokens(), share=0.0)
    bench.encode(blender)
    tokens, request = prompt([0, 1, 2])
    slots = np.arange(len(tokens))
    blender.prefill([BlendRequest(tokens, slots)])
    bench.engine.store(tokens, slot_mapping=slots)
    assert bench.engine.flush()
    bench.cache.fill(float("nan"))
    (found,) = blender.prefill([request])
    assert (found.num_known, found.num_reused, found.num_computed) == (len(tokens) - 1, 0, 1)
    torch.testing.assert_close(found.logits.cpu(), bench.full(tokens), **EXACT)
    bench.close()
