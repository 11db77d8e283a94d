"""The reference engine serves prompts with segments among others."""

from __future__ import annotations

from typing import Any

import pytest
from blend.conftest import CHUNK, DOCUMENTS, Bench, prompt

from lwkv.blend import AllTokens, Deviation
from lwkv.errors import RequestError
from lwkv.reference import Limits, Prompt, ReferenceEngine, generate
from lwkv.steps import LayerSteps


def serving(bench: Bench, blender: Any = None) -> ReferenceEngine:
    return ReferenceEngine(
        bench.model,
        bench.cache,
        steps=LayerSteps(bench.engine),
        lookup=bench.engine.lookup,
        limits=Limits(chunk_size=CHUNK),
        blender=blender,
    )


def asked(*order: int) -> Prompt:
    tokens, request = prompt(order)
    return Prompt(tokens, 6, segments=request.segments)


def test_answers_with_everything_computed_are_those_without_a_cache(bench: Bench) -> None:
    blender = bench.blender(AllTokens(), share=1.0)
    bench.encode(blender)
    prompts = [asked(2, 0), Prompt(DOCUMENTS[0] * 2, 6), asked(1), asked(1, 2)]
    wanted = generate(ReferenceEngine(bench.model, bench.cache), prompts)
    bench.cache.fill(float("nan"))
    found = generate(serving(bench, blender), prompts)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]
    assert [answer.num_loaded for answer in found] == [34, 0, 8, 29]


def test_what_is_not_cached_is_encoded_once_its_prompt_is_answered(bench: Bench) -> None:
    blender = bench.blender(Deviation(), share=0.3)
    engine = serving(bench, blender)
    (first,) = generate(engine, [asked(0, 1)])
    assert bench.engine.flush()
    (second,) = generate(engine, [asked(1, 0)])
    assert (first.num_loaded, first.num_computed) == (0, first.num_prompt)
    assert (second.num_loaded, second.num_computed) == (21, second.num_prompt - 21 + 6)
    assert engine.allocator.num_free == bench.cache.num_blocks


def test_a_blended_prompt_is_never_stored_as_a_prefix(bench: Bench) -> None:
    blender = bench.blender(Deviation(), share=0.3)
    bench.encode(blender)
    generate(serving(bench, blender), [asked(2, 1, 0)])
    assert bench.engine.flush()
    assert bench.engine.lookup(asked(2, 1, 0).tokens) == 0


def test_without_a_blender_segments_mean_nothing(bench: Bench) -> None:
    (found,) = generate(serving(bench), [asked(2, 0)])
    assert bench.engine.flush()
    assert bench.engine.lookup(asked(2, 0).tokens) == len(asked(2, 0).tokens) // CHUNK * CHUNK
    assert found.num_loaded == 0


@pytest.mark.parametrize("num_blocks", [13, 60])
def test_prompts_that_do_not_fit_together_wait_for_each_other(bench: Bench, num_blocks: int) -> None:
    blender = bench.blender(AllTokens(), share=1.0)
    bench.encode(blender)
    engine = serving(bench, blender)
    held = engine.allocator.take(bench.cache.num_blocks - num_blocks)
    found = generate(engine, [asked(2, 0), asked(0, 1), asked(1)])
    wanted = generate(ReferenceEngine(bench.model, bench.cache), [asked(2, 0), asked(0, 1), asked(1)])
    assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]
    engine.allocator.free(held)


def test_segments_that_do_not_fit_are_refused_before_they_are_in_a_batch(bench: Bench) -> None:
    engine = serving(bench, bench.blender(AllTokens(), share=1.0))
    engine.submit(asked(2, 0))
    with pytest.raises(RequestError, match="overlap or are out of order"):
        engine.submit(Prompt(list(range(20)), 6, segments=[(5, 9), (8, 12)]))
    answers: dict[int, Any] = {}
    while engine.has_work:
        answers.update(engine.step())
    assert list(answers) == [0]
    assert engine.allocator.num_free == bench.cache.num_blocks


def test_a_prompt_goes_on_from_what_the_engine_has_itself(bench: Bench) -> None:
    blender = bench.blender(AllTokens(), share=1.0)
    bench.encode(blender)
    engine = serving(bench, blender)
    tokens, request = prompt([1, 2])
    (head,) = generate(engine, [Prompt(tokens[:9], 1, keep_blocks=True)])
    (found,) = generate(
        engine, [Prompt(tokens, 6, segments=request.segments, num_local=9, local_blocks=head.blocks)]
    )
    (wanted,) = generate(ReferenceEngine(bench.model, bench.cache), [Prompt(tokens, 6)])
    assert found.tokens == wanted.tokens
    assert found.num_loaded == 1 + 21
