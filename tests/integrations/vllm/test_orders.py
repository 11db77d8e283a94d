from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lwkv.integrations.vllm.orders import NULL_BLOCK, Move, StepOrders
from lwkv.integrations.vllm.reports import RankInfo, RankReport, StepReports
from lwkv.transfer import NO_SLOT


def move(tokens: int, blocks: list[int], first: int, end: int) -> Move:
    return Move(np.arange(tokens), ("salt", "s"), np.array(blocks, np.int64), first, end)


@given(
    block_size=st.integers(1, 5),
    blocks=st.lists(st.integers(0, 9), max_size=6),
    tokens=st.integers(0, 25),
    ends=st.tuples(st.integers(0, 25), st.integers(0, 25)),
)
def test_a_slot_is_the_token_s_place_in_its_block_if_it_is_moved_and_has_one(
    block_size: int, blocks: list[int], tokens: int, ends: tuple[int, int]
) -> None:
    first, end = sorted(min(e, tokens) for e in ends)
    slots = move(tokens, blocks, first, end).slots(block_size).tolist()
    for token in range(tokens):
        number, offset = divmod(token, block_size)
        has_one = number < len(blocks) and blocks[number] != NULL_BLOCK
        wanted = blocks[number] * block_size + offset if has_one and first <= token < end else NO_SLOT
        assert slots[token] == wanted


def test_orders_and_reports_travel_between_processes() -> None:
    orders = StepOrders(3, 2, [move(8, [4, 5], 4, 8)], [move(8, [4, 5], 0, 8)])
    copy = pickle.loads(pickle.dumps(orders))
    assert (copy.step, copy.acknowledged, copy.moves_anything) == (3, 2, True)
    assert copy.loads[0].slots(4).tolist() == orders.loads[0].slots(4).tolist()
    assert not StepOrders(1, 0).moves_anything
    reports = StepReports((RankReport(RankInfo(1, "name"), 3, True, [b"k"]),))
    assert pickle.loads(pickle.dumps(reports)) == reports


def test_reports_of_the_ranks_of_a_step_are_put_together() -> None:
    reports = [StepReports((RankReport(RankInfo(rank, f"name-{rank}"), 3),)) for rank in range(3)]
    together = reports[0].aggregate(reports[1]).aggregate(reports[2])
    assert [report.info.rank for report in together.reports] == [0, 1, 2]
