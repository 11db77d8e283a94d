"""What is measured of blends in vLLM, without a vLLM."""

from __future__ import annotations

import pytest

from lwkv.benchmarks.shapes import LLAMA_8B
from lwkv.benchmarks.vllm_blend import Found, Plan, parser

PLAN = Plan(documents=3, tokens=16, question=5, share=0.15, repeats=2, seconds=1.0, every_s=0.5, eager=True)


def test_turns_have_the_same_documents_in_other_orders_and_other_questions() -> None:
    turns = [PLAN.prompt(turn, 1000) for turn in range(8)]
    for ids, segments in turns:
        assert len(ids) == 3 + 3 * 17 + 5
        assert [end - start for start, end in segments] == [16, 16, 16]
    texts = [[tuple(ids[start:end]) for start, end in segments] for ids, segments in turns]
    assert len({frozenset(parts) for parts in texts}) == 1
    assert len({tuple(parts) for parts in texts}) > 2
    assert len({tuple(ids[-5:]) for ids, _ in turns}) == len({tuple(ids[:3]) for ids, _ in turns}) == 8


def test_rows_are_those_that_a_blend_computes() -> None:
    plan = Plan(8, 1024, 64, 0.15, 1, 1.0, 1.0, True)
    assert plan.rows(LLAMA_8B) == int(8192 * (2 / 32 + 30 / 32 * 0.15)) + 64


def test_the_summary_compares_with_the_larger_of_loading_and_computing() -> None:
    found = Found("blend", [66.0, 60.0, 70.0], [20.0, 22.0], [55.0, 60.0, 65.0], [5.0, 5.0, 20.0], "prompts")
    assert found.summary() == {
        "mode": "blend",
        "ttft": 66.0,
        "load": 21.0,
        "compute": 60.0,
        "over_larger": 1.1,
        "between_p50": 5.0,
        "between_p99": pytest.approx(19.7),
        "beside": "prompts",
    }
    assert Found("plain", [3.0]).summary() == {"mode": "plain", "ttft": 3.0, "beside": ""}


def test_the_command_line_is_the_one_of_the_issue_by_default() -> None:
    args = parser().parse_args([])
    assert (args.shape, args.documents * args.tokens, args.question) == ("llama-8b", 8192, 64)
