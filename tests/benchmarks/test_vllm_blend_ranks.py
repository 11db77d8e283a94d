"""What is said of blends by several ranks, without a vLLM."""

from __future__ import annotations

import math
from typing import Any

from lwkv.benchmarks.vllm.blend_ranks import EXTENSION, AllRanks, BlendRank, apart, faults
from lwkv.benchmarks.vllm_blend import parser


def test_ranks_that_have_computed_other_rows_or_other_prompts_are_named() -> None:
    assert faults([["a", "b"], ["a", "b"]], 2) == []
    assert faults([["a", "b", "c"], ["a", "d", "c"]], 3) == ["ranks have computed other rows in blends [1]"]
    assert faults([["a"], ["a"]], 2) == ["ranks have blended [1, 1] prompts, and 2 were asked for"]
    assert faults([["a"], []], 1) == ["ranks have blended [1, 0] prompts, and 1 were asked for"]


def test_answers_are_compared_by_the_tokens_that_both_have() -> None:
    assert apart({1: -2.0, 2: -3.0}, {2: -3.5, 3: -1.0}) == 0.5
    assert apart({1: -2.0}, {2: -2.0}) == math.inf


def test_all_ranks_are_asked_by_methods_that_each_has() -> None:
    asked: list[tuple[str, tuple[Any, ...]]] = []
    answers = {
        "blend_flush": [True, False],
        "blend_counts": [{"n": 1.0}, {"n": 1.0}],
        "blend_chosen": [["a"]],
    }

    class Llm:
        def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> Any:
            asked.append((name, args))
            return answers.get(name, [None, None])

    ranks = AllRanks(Llm())
    assert not ranks.flush()
    assert ranks.counts() == {"n": 1.0}
    ranks.select("query", 0.15)
    ranks.fill(1)
    assert ranks.faults(1) == []
    assert ("blend_select", ("query", 0.15)) in asked
    assert all(hasattr(BlendRank, name) for name, _ in asked)
    assert EXTENSION == "lwkv.benchmarks.vllm.blend_ranks.BlendRank"
    assert parser().parse_args(["--ranks", "2"]).ranks == 2
