"""Prompts of any make, against the dense reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from blend.conftest import DOCUMENTS, Bench
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lwkv.blend import Blender, BlendRequest, FirstTokens

CACHED = range(2)
GAPS = st.lists(st.integers(0, 100), max_size=3)


def wanted(
    bench: Bench,
    blender: Blender,
    tokens: list[int],
    segments: Sequence[tuple[int, int]],
    known: int,
    count: int,
) -> Tensor:
    """Logits where `known` tokens are exact and of each cached segment all but `count` tokens are reused."""
    reused = {0: bench.dense.alone(tokens[:known], 0)} if known else {}
    kept = set(range(known))
    for start, end in segments:
        first = max(start, known)
        if start and tokens[start:end] in [DOCUMENTS[i] for i in CACHED] and first < end:
            layers = bench.alone(blender, tokens[start:end])
            cut = [tuple([head[first - start :] for head in part] for part in layer) for layer in layers]
            reused[first] = cut
            kept |= set(range(first + count, end))
    computed = [i for i in range(len(tokens)) if i not in kept or i == len(tokens) - 1]
    return bench.dense.blend(tokens, computed, reused).float()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.lists(st.sampled_from([0, 1, 2]), max_size=3),
    gaps=st.lists(GAPS, min_size=4, max_size=4),
    count=st.integers(0, 3),
    local=st.floats(0, 1),
    seed=st.integers(0, 5),
)
def test_any_prompt_equals_the_dense_reference(
    bench: Bench, order: list[int], gaps: list[list[int]], count: int, local: float, seed: int
) -> None:
    blender = bench.blender(FirstTokens(count), share=0.1)
    for number in CACHED:
        if blender.missing(DOCUMENTS[number], [(0, len(DOCUMENTS[number]))]):
            bench.encode(blender, [DOCUMENTS[number]])
    tokens, segments = list(gaps[0]), []
    for number, gap in zip(order, gaps[1:], strict=False):
        segments.append((len(tokens), len(tokens) + len(DOCUMENTS[number])))
        tokens += [*DOCUMENTS[number], *gap]
    if not tokens:
        return
    slots = np.random.default_rng(seed).permutation(300)[: len(tokens)]
    known = round(local * (len(tokens) - 1))
    bench.cache.fill(float("nan"))
    if known:
        blender.prefill([BlendRequest(tokens[:known], slots[:known])])
    (found,) = blender.prefill([BlendRequest(tokens, slots, segments, num_local=known)])
    assert found.num_known == known
    expected = wanted(bench, blender, tokens, segments, known, count)
    torch.testing.assert_close(found.logits.cpu(), expected, rtol=2e-4, atol=2e-4)
