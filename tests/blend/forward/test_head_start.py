"""The first layer runs ahead of the lookups where all of it is computed whatever they find."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from blend.conftest import CHUNK, DOCUMENTS, Bench, prompt, with_documents_in
from hypothesis import given
from hypothesis import strategies as st
from oracle import MemoryTier
from torch import Tensor

from lwkv.blend import Blender, BlendRequest, Deviation, FirstTokens, QueryAttention
from lwkv.blend.forward.rows import ComputedRows, PromptReuse
from lwkv.blend.request import check_blend
from lwkv.keys import LayerKey
from lwkv.reference import ModelShape
from lwkv.storage import Status

SEVERAL = Deviation("v", (1, 2), (0.4, 0.2))
LATE_CHECK = Deviation("k", (2,), (0.3,))


def watch(blender: Blender, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens in turn: 'looked up', and 'layer 0' when it is computed."""
    happened: list[str] = []
    retrieval, finish = blender.segments.retrieval, blender.model.finish

    def look_up(*arguments: Any) -> Any:
        happened.append("looked up")
        return retrieval(*arguments)

    def compute(layer: int, *arguments: Any) -> Tensor:
        if layer == 0:
            happened.append("layer 0")
        return finish(layer, *arguments)

    monkeypatch.setattr(blender.segments, "retrieval", look_up)
    monkeypatch.setattr(blender.model, "finish", compute)
    return happened


def add_in_place(blender: Blender, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the model write a layer's states over those before, as models may."""
    finish = blender.model.finish
    monkeypatch.setattr(blender.model, "finish", lambda n, hidden, a: hidden.copy_(finish(n, hidden, a)))


@pytest.mark.parametrize("selector", [Deviation(), SEVERAL, LATE_CHECK], ids=str)
def test_it_is_computed_once_and_before_segments_are_looked_up(
    selector: Deviation, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    blender = bench.blender(selector, share=0.2)
    bench.encode(blender)
    happened = watch(blender, monkeypatch)
    requests = [prompt([2, 0, 1])[1], prompt([1])[1]]
    requests[1] = replace(
        requests[1], slot_mapping=np.setdiff1d(np.arange(300), requests[0].slot_mapping)[:16]
    )
    (found, _) = blender.prefill(requests)
    assert found.num_reused == 42
    assert happened == ["layer 0", "looked up"]


@pytest.mark.parametrize("selector", [FirstTokens(), QueryAttention(1, 2)], ids=str)
def test_it_is_not_where_only_some_rows_are_computed_in_it(
    selector: Any, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    blender = bench.blender(selector, share=0.2)
    bench.encode(blender)
    happened = watch(blender, monkeypatch)
    blender.prefill([prompt([2, 0, 1])[1]])
    assert happened[0] == "looked up"


def test_it_is_not_where_a_prefix_is_known(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    blender = bench.blender(share=0.2)
    bench.encode(blender)
    tokens, request = prompt([2, 0, 1])
    blender.prefill([BlendRequest(tokens[:CHUNK], request.slot_mapping[:CHUNK])])
    bench.engine.store(tokens[:CHUNK], slot_mapping=request.slot_mapping[:CHUNK])
    assert bench.engine.flush()
    happened = watch(blender, monkeypatch)
    assert blender.prefill([request])[0].num_known == CHUNK
    assert blender.prefill([replace(request, num_local=3)])[0].num_known == CHUNK
    assert happened == ["looked up", "layer 0"] * 2


def test_it_is_not_where_a_segment_in_front_is_exact(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    blender = bench.blender(share=0.2, shared_prefix=())
    bench.encode(blender)
    happened = watch(blender, monkeypatch)
    (found,) = blender.prefill([prompt([2, 0, 1], head=())[1]])
    assert found.num_known == len(DOCUMENTS[2])
    assert happened == ["looked up", "layer 0"]


@pytest.mark.parametrize("selector", [Deviation(), SEVERAL, LATE_CHECK], ids=str)
def test_what_comes_of_it_is_the_same_bit_by_bit(
    selector: Deviation, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    blender = bench.blender(selector, share=0.2)
    bench.encode(blender)
    _, request = prompt([2, 0, 1])
    caches = []
    for ahead in (True, False):
        if not ahead:
            monkeypatch.setattr(blender, "_head_start", lambda *_: None)
        bench.cache.fill(float("nan"))
        (found,) = blender.prefill([request])
        rows = blender._rows.at(torch.from_numpy(np.array(request.slot_mapping)).to(bench.model.device))
        layers = range(bench.shape.num_layers)
        caches.append([found.logits, *(torch.stack(blender._rows.read(layer, rows)) for layer in layers)])
    for one, other in zip(*caches, strict=True):
        assert torch.equal(one, other)


def test_a_pass_that_is_begun_again_computes_it_again(
    shape: ModelShape, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = MemoryTier()
    bench = with_documents_in(tier, shape, device)
    blender = bench.blender(LATE_CHECK, share=1.0)
    lost = {LayerKey(key, 2) for key in blender.segments.keys(DOCUMENTS[2])}
    tier.fails = lambda key: Status.ERROR if key in lost else Status.OK
    add_in_place(blender, monkeypatch)
    happened = watch(blender, monkeypatch)
    tokens, request = prompt([2, 0, 1])
    (found,) = blender.prefill([request])
    assert happened == ["layer 0", "looked up", "looked up", "layer 0"]
    assert found.num_reused == 21
    torch.testing.assert_close(found.logits.cpu(), bench.full(tokens), rtol=1e-4, atol=1e-4)
    bench.close()


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=3))
def test_rows_are_marked_on_the_device_as_they_would_be_made(reused: list[list[bool]]) -> None:
    reuses, bare = [], []
    for flags in reused:
        checked = check_blend(BlendRequest(list(range(len(flags))), np.arange(len(flags))), 100)
        reuses.append(PromptReuse(checked, 0, np.array(flags)))
        bare.append(PromptReuse(checked, 0, np.zeros(len(flags), bool)))
    wanted = ComputedRows.of(reuses, [reuse.candidates for reuse in reuses], torch.from_numpy)
    marked = ComputedRows.of(bare, [np.zeros(0, np.int64)] * len(bare), torch.from_numpy).marked(reuses)
    assert marked.bounds == wanted.bounds
    for name in ("tokens", "positions", "slots", "always"):
        assert torch.equal(getattr(marked, name), getattr(wanted, name))
