"""Blending by two ranks of tensor parallel: both compute the same rows, whatever one of them has lost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import BLOCK, Answer, assert_same, prompt
from integrations.in_vllm.test_blending import Documents, blending, documents

from lwkv.integrations.vllm.worker.meter import QUIET_S

TWO_RANKS = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}


class Asked:
    """An engine in processes of its own."""

    def __init__(self, llama: Path, connector: str = "", **settings: Any) -> None:
        arguments = blending(**settings) | {"enable_prefix_caching": True, "max_num_batched_tokens": 1024}
        arguments |= {"num_gpu_blocks_override": 1200 // BLOCK, "max_model_len": 1024}
        if connector:
            places = {
                "kv_connector": connector,
                "kv_connector_module_path": "integrations.in_vllm.unequal_ranks",
            }
            arguments["kv_transfer_config"] |= places
        self.engine = Elsewhere(llama, {}, **arguments, **TWO_RANKS)

    def ask(self, prompts: Sequence[Documents], max_tokens: int = 8) -> list[Answer]:
        extras = [{"kv_transfer_params": {"lwkv_segments": one.segments}} for one in prompts]
        answers: list[Answer] = self.engine.call("ask_with", [one.ids for one in prompts], extras, max_tokens)
        return answers

    def encode(self, parts: Sequence[list[int]]) -> None:
        self.ask([Documents(parts, prompt(99, 40))], 1)
        self.engine.call("ask", [prompt(98, 5)], 20)  # the scheduler hears of what is in host memory

    def counted(self, name: str) -> int:
        """Over all ranks."""
        time.sleep(1.1 * QUIET_S)  # what a step counts that moves nothing else may wait for so long
        self.engine.call("ask", [prompt(98, 5)], 2)
        return int(self.engine.call("metric", f"vllm:lwkv_blend_{name}"))


@pytest.fixture
def asked(request: pytest.FixtureRequest, llama: Path) -> Iterator[Asked]:
    asked = Asked(llama, **request.param)
    try:
        yield asked
    finally:
        asked.engine.close()


@pytest.mark.parametrize("asked", [{"blend_recompute_ratios": 1.0}], indirect=True)
def test_two_ranks_that_compute_all_again_give_vllms_own_answer(asked: Asked, plain: Elsewhere) -> None:
    parts = documents(300, 100, 150, 77)
    asked.encode(parts)
    for order in ((0, 1, 2), (2, 0, 1)):
        one = Documents([parts[number] for number in order], prompt(306 + order[0], 33), [11, 12, 13, 14])
        assert_same(asked.ask([one]), plain.ask([one.ids]))
    # Beside another one, which both ranks stop for behind the same layers.
    beside = Documents([], prompt(309, 90), [])
    one = Documents(parts[::-1], prompt(310, 33), [11, 12, 13, 14])
    assert_same(asked.ask([beside, one, one], 16), plain.ask([beside.ids, one.ids, one.ids], 16))
    # Both ranks count.
    assert asked.counted("requests") == 2 * 4
    # Of a crowd that needs more blocks than there are some are preempted: both ranks start these anew.
    crowd = [Documents([], prompt(320 + number, 60), []) for number in range(3)]
    crowd += [Documents(parts[number:], prompt(330 + number, 33), [11, 12, 13, 14]) for number in (0, 1, 0)]
    assert_same(asked.ask(crowd, 100), plain.ask([one.ids for one in crowd], 100))
    assert asked.engine.call("metric", "vllm:num_preemptions") > 0
    assert asked.counted("requests") >= 2 * (4 + 3)
    assert asked.counted("failures") == 0


# One rank alone would compute more while it loads.
FIXED_SHARE = {"blend_recompute_ratios": 0.3, "blend_more_while_loading": False}


@pytest.mark.parametrize("asked", [FIXED_SHARE], indirect=True)
def test_two_ranks_choose_the_rows_that_one_rank_does(asked: Asked, llama: Path) -> None:
    """What they have in common is the sum of what has changed in the heads of each."""
    parts = documents(310, 100, 150, 77)
    asked.encode(parts)
    prompts = [Documents(parts[::-1], prompt(311 + number, 33)) for number in range(3)]
    found = [asked.ask([one])[0] for one in prompts]
    computed = asked.counted("tokens_chosen")
    alone = Asked.__new__(Asked)
    arguments = blending(**FIXED_SHARE) | {"enable_prefix_caching": True}
    alone.engine = Elsewhere(llama, {}, max_num_batched_tokens=1024, **arguments)
    try:
        alone.encode(parts)
        assert_same([alone.ask([one])[0] for one in prompts], found)
        assert computed == 2 * alone.counted("tokens_chosen") > 0
    finally:
        alone.engine.close()


@pytest.mark.parametrize(
    "asked", [{"blend_recompute_ratios": 1.0, "connector": "UnequalRanks"}], indirect=True
)
def test_a_rank_that_lost_what_the_other_has_leaves_neither_waiting(asked: Asked, plain: Elsewhere) -> None:
    for turn in range(6):
        parts = documents(320 + turn, 70, 120)
        asked.encode(parts)
        one, beside = (
            Documents(parts[::-1], prompt(330 + turn, 33)),
            Documents([], prompt(340 + turn, 90), []),
        )
        assert_same(asked.ask([one, beside]), plain.ask([one.ids, beside.ids]))
    assert asked.counted("requests") == 2 * 4 + 2, "one rank has loaded all of two that the other one has not"
    assert asked.counted("failures") == 2
