"""Which prompts are blended, up to where, and what is encoded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from integrations.vllm.blending.planner_bench import (
    BLOCK,
    CHUNK,
    PREFIX,
    PROMPT,
    SEGMENTS,
    SIZES,
    TIMEOUT_S,
    Bench,
    FakeRequest,
)

from lwkv.integrations.vllm.blending.scheduler.encodes import slots_of
from lwkv.integrations.vllm.blending.scheduler.plan import BlendSizes
from lwkv.integrations.vllm.blending.worker.side import question_of


def test_a_prompt_is_blended_up_to_the_last_block_that_a_cached_segment_fills() -> None:
    bench = Bench()
    one = bench.follow(FakeRequest())
    assert bench.planner.claim(one, 0, 0) == 0
    bench.cache(one, *SEGMENTS)
    assert bench.planner.claim(one, 0, 0) == 40
    assert bench.planner.claim(one, 8, 12) == 32
    assert bench.planner.allocated(one, [], 32)
    order = bench.planner.blend(one, (), [9, 8, 7, 6, 5, 4, 3, 2, 1, 10, 11])
    assert order is not None
    assert (order.num_local, order.num_exact, order.end, order.segments) == (8, 12, 40, SEGMENTS)
    assert order.slots.tolist()[:5] == [36, 37, 38, 39, 32]
    assert order.tokens.tolist() == PROMPT[:42]
    assert bench.planner.blend(one, (), [9]) is None


def test_a_question_comes_along_where_a_selector_asks_and_the_step_has_all_of_it() -> None:
    blocks = [9, 8, 7, 6, 5, 4, 3, 2, 1, 10, 11, 12, 13, 14, 15]
    for asks, num_blocks, wanted in ((True, 15, 20), (True, 14, 0), (False, 15, 0)):
        bench = Bench(replace(SIZES, asks=asks))
        one = bench.follow(FakeRequest())
        bench.cache(one, *SEGMENTS)
        assert bench.planner.allocated(one, blocks[:num_blocks], bench.planner.claim(one, 8, 12) or 0)
        order = bench.planner.blend(one, (), blocks[:num_blocks])
        assert order is not None
        assert order.question_slots.tolist() == slots_of(blocks, BLOCK)[40 : 40 + wanted].tolist()
        assert order.tokens.tolist() == PROMPT[: 60 if wanted else 42]
        assert len(order.slots) == 40


def test_nothing_is_blended_that_an_exact_prefix_covers() -> None:
    bench = Bench()
    one = bench.follow(FakeRequest())
    bench.cache(one, *SEGMENTS)
    assert bench.planner.claim(one, 40, 40) == 0
    assert bench.planner.claim(one, 20, 40) == 0
    assert bench.planner.blended_from(one) is None


def test_chunks_behind_one_that_is_not_cached_are_computed() -> None:
    bench = Bench()
    one = bench.follow(FakeRequest())
    hashes = bench.hashes(one, SEGMENTS[1])
    bench.report(kept=[hashes[0], hashes[2]])
    assert bench.planner.claim(one, 0, 0) == 28


def test_what_stands_first_is_only_reused_if_it_was_computed_first() -> None:
    parts = ((0, 16), (20, 36))
    for prefix, end in ((PREFIX, 0), ((), 16)):
        bench = Bench(prefix=prefix)
        one = bench.follow(FakeRequest(segments=parts))
        bench.cache(one, parts[0])
        assert bench.planner.claim(one, 0, 0) == end


def test_the_prompts_last_token_is_left_to_vllm() -> None:
    bench = Bench()
    one = bench.follow(FakeRequest(segments=[(2, 60)]))
    bench.cache(one, (2, 60))
    assert bench.planner.claim(one, 0, 0) == 56


def test_short_prompts_are_not_blended() -> None:
    bench = Bench(replace(SIZES, min_tokens=61))
    one = bench.follow(FakeRequest())
    bench.cache(one, *SEGMENTS)
    assert bench.planner.claim(one, 0, 0) == 0


def test_a_step_blends_as_many_rows_as_it_may_have_tokens() -> None:
    # Of reused tokens 0.5 + 0.5 * 0.2 are computed: 2 + 14 * 0.6 up to 16, and 4 + 36 * 0.6 up to 40.
    for most_rows, end in ((10, 0), (11, 16), (25, 16), (26, 40)):
        bench = Bench(replace(SIZES, most_rows=most_rows))
        one = bench.follow(FakeRequest())
        bench.cache(one, *SEGMENTS)
        assert bench.planner.claim(one, 0, 0) == end, most_rows


def test_a_step_blends_one_prompt_and_the_other_one_waits() -> None:
    bench = Bench()
    one, two = (bench.follow(FakeRequest(name)) for name in ("one", "two"))
    bench.cache(one, *SEGMENTS)
    assert bench.planner.claim(one, 0, 0) == 40
    assert bench.planner.claim(two, 0, 0) == 40  # the first one did not get its blocks
    assert bench.planner.allocated(two, [], 40)
    assert bench.planner.claim(one, 0, 0) is None
    bench.step()
    assert bench.planner.blend(one, (), []) is None
    assert bench.planner.claim(one, 0, 0) == 40


BLOCKS = [9, 8, 7, 6, 5, 4, 3, 2, 1, 10, 11, 12, 13, 14, 15]
IN_PARTS = replace(SIZES, in_parts=True)


def beside_another(sizes: BlendSizes = IN_PARTS) -> tuple[Bench, FakeRequest]:
    """A prompt whose segments are cached, while another request is running."""
    bench = Bench(sizes)
    other = bench.follow(FakeRequest("other", list(range(160, 220)), segments=()))
    assert not bench.planner.allocated(other, [], 0)
    bench.step(other=60)
    one = bench.follow(FakeRequest())
    bench.cache(one, *SEGMENTS)
    return bench, one


def test_beside_another_request_a_blend_is_done_in_parts_while_its_prompt_waits() -> None:
    bench, one = beside_another()
    two = bench.follow(FakeRequest("two"))
    assert bench.planner.claim(one, 8, 12) == 32
    assert bench.planner.waits_for_blend(one)
    assert bench.planner.allocated(one, BLOCKS[:10], 32)
    assert bench.planner.is_planned(one)
    request, blocks = bench.planner.take_begun() or (None, ())
    assert bench.planner.take_begun() is None
    assert (request, list(blocks)) == (one, BLOCKS[:10])
    order = bench.planner.blend(one, (), blocks)
    assert order is not None
    assert (order.waiting, order.num_local, order.end) == ("one", 8, 40)
    assert not bench.planner.waits_for_blend(one)
    for _ in range(3):
        bench.step()
        assert bench.planner.is_under_way
        assert bench.planner.is_waiting(one)
        assert bench.planner.claim(two, 8, 12) is None
    bench.planner.blends_ended({"another"})
    assert bench.planner.is_under_way
    bench.planner.blends_ended({"one"})
    assert not bench.planner.is_under_way
    assert bench.planner.claim(two, 8, 12) == 32
    assert bench.planner.is_waiting(one)
    assert bench.planner.comes_back(one) == 8
    assert bench.planner.comes_back(one) is None
    assert not bench.planner.is_waiting(one)
    assert bench.planner.blended_from(one) == 12


def test_a_prompt_that_is_alone_is_blended_in_its_step() -> None:
    bench, one = beside_another()
    bench.planner.stops("other")
    assert bench.planner.claim(one, 8, 12) == 32
    assert not bench.planner.waits_for_blend(one)
    assert bench.planner.allocated(one, BLOCKS, 32)
    assert bench.planner.take_begun() is None
    order = bench.planner.blend(one, (), BLOCKS)
    assert order is not None
    assert order.waiting is None
    assert bench.planner.comes_back(one) is None
    bench, one = beside_another(SIZES)
    assert bench.planner.claim(one, 8, 12) == 32
    assert not bench.planner.waits_for_blend(one)


def test_a_prompt_that_waits_brings_the_question_that_a_selector_asks_for() -> None:
    for sizes, segments, end, asks in (
        (replace(IN_PARTS, asks=True), SEGMENTS, 40, True),
        # 4 + 36 * 0.6 up to 40, and 20 more.
        (replace(IN_PARTS, asks=True, most_rows=40), SEGMENTS, 40, False),
        (replace(IN_PARTS, asks=True), (SEGMENTS[0], (20, 60)), 56, False),
    ):
        bench, _ = beside_another(sizes)
        one = bench.follow(FakeRequest("three", segments=segments))
        bench.cache(one, *segments)
        claimed = 60 if asks else end
        assert bench.planner.claim(one, 0, 0) == claimed
        assert bench.planner.allocated(one, BLOCKS, claimed)
        order = bench.planner.blend(one, (), BLOCKS)
        assert order is not None
        assert (order.end, order.question_slots.tolist()) == (
            end,
            slots_of(BLOCKS, BLOCK)[end:claimed].tolist(),
        )
        question = question_of(order)
        assert (question is not None) == asks
        if question is not None:
            assert (question.first, question.tokens.tolist()) == (41, PROMPT)


def test_a_prompt_whose_blend_in_parts_has_failed_is_computed() -> None:
    """vLLM asks again where it has nothing left; it could fail for ever."""
    bench, one = beside_another()
    assert bench.planner.claim(one, 0, 0) == 40
    assert bench.planner.allocated(one, BLOCKS[:10], 40)
    bench.planner.blends_ended({"one"})
    assert bench.planner.claim(one, 0, 0) == 0
    assert not bench.planner.waits_for_blend(one)
    assert bench.planner.blended_from(one) == 0


def test_after_a_blend_in_parts_a_preempted_prompt_is_blended_again() -> None:
    bench, one = beside_another()
    assert bench.planner.claim(one, 0, 0) == 40
    assert bench.planner.allocated(one, BLOCKS[:10], 40)
    bench.planner.blends_ended({"one"})
    assert bench.planner.comes_back(one) == 0
    bench.step(one=60)
    assert bench.planner.claim(one, 0, 0) == 40


def test_prompts_that_wait_for_a_blend_hold_nobody_up() -> None:
    """They compute nothing, and nobody has blocks of theirs."""
    bench, one = beside_another()
    bench.planner.claim(one, 8, 8)
    assert bench.planner.allocated(one, BLOCKS[:10], 32)
    bench.planner.blends_ended({"one"})
    bench.planner.end("other")
    bench.step()
    two = bench.follow(FakeRequest("two"))
    assert bench.planner.claim(two, 8, 8) == 32
    assert not bench.planner.waits_for_blend(two)


def test_a_prompt_waits_for_tokens_that_another_one_computes_just_now() -> None:
    bench = Bench()
    one, two = (bench.follow(FakeRequest(name)) for name in ("one", "two"))
    bench.cache(one, SEGMENTS[1])
    assert not bench.planner.allocated(one, [], 0)
    assert bench.planner.claim(two, 8, 8) is None
    bench.step(one=60)
    assert bench.planner.claim(two, 8, 8) == 32
    bench.planner.loads_failed()
    assert bench.planner.claim(two, 8, 8) is None
    bench.planner.end("one")
    assert bench.planner.claim(two, 8, 8) == 32


def test_a_prompt_that_waits_for_too_long_for_anothers_tokens_is_computed() -> None:
    bench = Bench()
    one, two = (bench.follow(FakeRequest(name)) for name in ("one", "two"))
    bench.cache(one, SEGMENTS[1])
    assert not bench.planner.allocated(one, [], 0)
    assert bench.planner.claim(two, 8, 8) is None
    bench.now = TIMEOUT_S - 0.1
    assert bench.planner.claim(two, 8, 8) is None
    bench.now = TIMEOUT_S
    for _ in range(2):
        assert bench.planner.claim(two, 8, 8) == 0
    assert bench.planner.blended_from(two) is None
    assert bench.counters.totals()["blends_given_up"] == 1
    assert not bench.planner.allocated(two, [], 0)
    bench.planner.end("one")
    # It has begun to run since, and was preempted: it waits anew, were there anything to wait for.
    assert bench.planner.claim(two, 8, 8) == 32


def test_prompts_that_were_preempted_do_not_wait_for_each_other() -> None:
    """Neither computes anything; vLLM has what both begin with from a third one."""
    bench = Bench()
    one, two = (bench.follow(FakeRequest(name)) for name in ("one", "two"))
    bench.cache(one, SEGMENTS[1])
    for request in (one, two):
        assert not bench.planner.allocated(request, [], 0)
    bench.step(one=4, two=4)
    for request in (one, two):
        bench.planner.claim(request, 8, 8)
    assert bench.planner.claim(one, 8, 8) == 32
    assert bench.planner.allocated(one, [], 32)
    bench.step(one=60)
    assert bench.planner.claim(two, 8, 8) == 32


def test_a_prompt_is_looked_at_once_whether_it_has_segments_or_not() -> None:
    """It may wait for thousands of steps, in each of which vLLM asks."""
    bench, looked_at = Bench(), []
    of = bench.planner._find.of
    bench.planner._find.of = lambda request: (looked_at.append(request), of(request))[1]  # type: ignore
    for segments in ((), SEGMENTS):
        one = FakeRequest(segments=segments)
        for _ in range(3):
            bench.follow(one)
            bench.planner.claim(one, 0, 0)
        assert looked_at.pop() is one
        assert not looked_at


def test_vllm_finds_nothing_that_was_blended_and_lwkv_stores_nothing_of_it() -> None:
    bench = Bench()
    one, other = bench.follow(FakeRequest()), FakeRequest()
    bench.cache(one, *SEGMENTS)
    assert bench.planner.blended_from(one) is None
    bench.planner.claim(one, 4, 12)
    assert one.block_hashes[:3] == other.block_hashes[:3]
    assert not set(one.block_hashes[3:]) & set(other.block_hashes)
    assert len(one.block_hashes) == len(other.block_hashes)
    assert bench.planner.blended_from(one) == 12
    bench.planner.claim(one, 20, 20)  # preempted, and found by itself
    assert bench.planner.blended_from(one) == 12


def test_hashes_of_another_form_are_not_blended() -> None:
    bench = Bench()
    one = bench.follow(FakeRequest())
    bench.cache(one, *SEGMENTS)
    one.block_hashes.pop()
    assert bench.planner.claim(one, 0, 0) == 0


def test_what_vllm_does_not_take_is_not_blended() -> None:
    bench = Bench()
    one = bench.follow(FakeRequest())
    bench.cache(one, *SEGMENTS)
    bench.planner.claim(one, 0, 0)
    assert not bench.planner.allocated(one, [], 0)
    assert bench.planner.blend(one, (), [1]) is None


def test_missing_segments_are_encoded_once_where_they_have_room() -> None:
    bench = Bench()
    one = bench.follow(FakeRequest())
    assert bench.planner.encode(one, ("salt",), [5, 6]) == []
    (order,) = bench.planner.encode(one, ("salt",), [5, 6, 1, 2, 3])
    assert order.tokens.tolist() == PROMPT[2:18]
    assert order.slots.tolist() == [20, 21, 22, 23, 24, 25, 26, 27, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert order.salts == ("salt",)
    (rest,) = bench.planner.encode(one, (), [5, 6, 1, 2, 3, 4])
    assert rest.tokens.tolist() == PROMPT[20:41]
    assert bench.planner.encode(one, (), list(range(20))) == []
    bench.now = 31.0
    bench.cache(one, SEGMENTS[1])
    assert len(bench.planner.encode(one, (), list(range(20)))) == 1


def test_what_was_evicted_after_it_was_encoded_is_encoded_again_at_once() -> None:
    bench = Bench()
    one = bench.follow(FakeRequest(segments=SEGMENTS[:1]))
    assert len(bench.planner.encode(one, (), list(range(20)))) == 1
    assert bench.planner.encode(one, (), list(range(20))) == []
    bench.cache(one, SEGMENTS[0])
    assert bench.planner.encode(one, (), list(range(20))) == []
    bench.evict(one, SEGMENTS[0])
    assert len(bench.planner.encode(one, (), list(range(20)))) == 1


def test_a_step_encodes_as_many_rows_as_it_may_have_tokens() -> None:
    bench = Bench(replace(SIZES, most_rows=30))
    one = bench.follow(FakeRequest())
    assert len(bench.planner.encode(one, (), list(range(20)))) == 1
    bench.step()
    assert len(bench.planner.encode(one, (), list(range(20)))) == 1


def test_after_a_reset_nothing_encoded_before_is_found() -> None:
    bench = Bench()
    one = bench.follow(FakeRequest())
    bench.cache(one, *SEGMENTS)
    bench.planner.claim(one, 0, 0)
    bench.planner.reset()
    assert bench.planner.claim(one, 0, 0) == 0
    assert bench.planner.encode(one, (), list(range(20))) == []
    assert bench.planner.blended_from(one) == 0
    bench.follow(one)
    assert bench.planner.claim(one, 0, 0) == 0


def test_requests_without_segments_are_not_kept() -> None:
    bench = Bench()
    one = bench.follow(FakeRequest(segments=()))
    assert not bench.planner.has_segments(one)
    assert len(bench.planner) == 0
    bench.follow(FakeRequest())
    assert not bench.planner.has_segments(one)
    bench.planner.end("one")
    assert len(bench.planner) == 0


@settings(deadline=None)
@given(st.lists(st.integers(0, 25), min_size=2, max_size=6, unique=True), st.integers(0, 6), st.data())
def test_every_plan_covers_whole_blocks_and_ends_in_a_cached_segment(
    edges: list[int], exact: int, data: st.DataObject
) -> None:
    bench, ends = Bench(prefix=()), sorted(edges)
    parts = [(2 * a, 2 * b) for a, b in zip(ends[::2], ends[1::2], strict=False)]
    one = bench.follow(FakeRequest(segments=parts))
    hashes = [each for part in parts for each in bench.hashes(one, part)]
    kept = data.draw(st.sets(st.sampled_from(hashes)))
    bench.report(kept=list(kept))
    claimed = bench.planner.claim(one, 0, exact * BLOCK)
    if not claimed:
        return
    order = (
        bench.planner.blend(one, (), np.arange(1, 20)) if bench.planner.allocated(one, [], claimed) else None
    )
    assert order is not None
    assert order.end == claimed
    assert order.end % BLOCK == 0
    assert exact * BLOCK < order.end < one.num_tokens
    last = order.segments[-1]
    assert last.start < order.end <= last.end
    assert bench.hashes(one, last)[max(exact * BLOCK - last.start, 0) // CHUNK] in kept
