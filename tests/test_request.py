"""Requests are brought into one form, or refused with a text that says what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lwkv.errors import RequestError
from lwkv.request import Request, check_loads, check_stores
from lwkv.transfer import NO_SLOT, CheckedRequest, Chunking

NUM_SLOTS = 64
WHOLE = Chunking(8, partial=False)
PARTIAL = Chunking(8, partial=True)
OPAQUE = Chunking(8, partial=True, unit=4)


def check(
    slots: Any, mask: Any = None, chunking: Chunking = WHOLE, tokens: Any = None, salts: Any = ()
) -> CheckedRequest:
    tokens = range(len(slots)) if tokens is None else tokens
    request = Request(tokens, slots, mask, salts)
    [checked] = check_loads([request], NUM_SLOTS, chunking)
    check_stores([request], NUM_SLOTS, chunking)
    return checked


@given(st.integers(0, 40), st.integers(1, 9), st.booleans(), st.integers(1, 3))
def test_chunks_cover_the_tokens_in_order(
    num_tokens: int, blocks_of_chunk: int, partial: bool, unit: int
) -> None:
    size = blocks_of_chunk * unit
    counts = Chunking(size, partial, unit).chunk_tokens(num_tokens).tolist()
    assert counts[: num_tokens // size] == [size] * (num_tokens // size)
    assert len(counts) <= num_tokens // size + 1
    covered = num_tokens // unit * unit if partial else num_tokens // size * size
    assert sum(counts) == covered
    assert 0 not in counts


@given(st.lists(st.integers(0, 12), max_size=8))
def test_a_slot_given_twice_is_found_wherever_it_is(slots: list[int]) -> None:
    if len(set(slots)) == len(slots):
        assert check(slots).slots.tolist() == slots
    else:
        with pytest.raises(RequestError, match="is given to two tokens") as refused:
            check(slots)
        named = int(str(refused.value).split()[1])
        assert slots.count(named) == 2 or slots.count(named) > 2


def test_tokens_without_a_slot_are_no_repetition() -> None:
    assert check([5, NO_SLOT, 3, NO_SLOT]).slots.tolist() == [5, NO_SLOT, 3, NO_SLOT]


@pytest.mark.parametrize(
    "slots",
    [
        [3, 4],
        (3, 4),
        np.array([3, 4], np.int32),
        np.array([3, 4], np.uint8),
        torch.tensor([3, 4]),
        torch.tensor([3, 4]).int(),
    ],
    ids=["list", "tuple", "int32", "uint8", "int64 tensor", "int32 tensor"],
)
def test_slots_may_come_in_any_container_of_whole_numbers(slots: Any) -> None:
    checked = check(slots)
    assert checked.slots.dtype == np.int64
    assert checked.slots.tolist() == [3, 4]


@pytest.mark.parametrize(
    "slots",
    [["a", "b"], [1.0, 2.0], [[1], [2]], [[1], [2, 3]], torch.tensor([1, 2]).bfloat16(), [True, False], None],
    ids=["texts", "fractions", "two dimensions", "unequal lists", "bfloat16", "flags", "none"],
)
def test_slots_of_another_kind_are_refused(slots: Any) -> None:
    with pytest.raises(RequestError):
        check(slots, tokens=[7, 8])


@pytest.mark.parametrize("slot", [-2, NUM_SLOTS, 2**40])
def test_a_slot_out_of_range_is_named_with_the_range(slot: int) -> None:
    with pytest.raises(RequestError, match=rf"slot {slot} is out of range: slots are 0 to 63, or -1"):
        check([0, slot])


@given(st.lists(st.booleans(), max_size=6))
def test_a_mask_is_false_then_true_or_refused(flags: list[bool]) -> None:
    slots = list(range(len(flags)))
    if flags == sorted(flags):
        assert check(slots, flags).first == flags.count(False)
    else:
        with pytest.raises(RequestError, match="leading part"):
            check(slots, flags)


@pytest.mark.parametrize(
    "mask", [[True], [0, 1], torch.ones(2), np.ones((2, 1), bool), "ab", [True, None]], ids=str
)
def test_a_mask_of_another_length_or_kind_is_refused(mask: Any) -> None:
    with pytest.raises(RequestError, match="must be bool, one for each of the 2 tokens"):
        check([0, 1], mask)


def test_no_tokens_are_a_request_too() -> None:
    checked = check([], [])
    assert (checked.first, checked.chunk_tokens.tolist(), checked.saves().num_chunks) == (0, [], 0)
    assert checked.new_chunks().tolist() == []


@pytest.mark.parametrize("salts", ["lora", [1], [None], {"a"}, 7, None], ids=str)
def test_salts_are_a_list_of_texts_or_refused(salts: Any) -> None:
    with pytest.raises(RequestError, match="list or tuple of texts"):
        check([0], salts=salts)


def test_loads_leave_out_what_the_engine_has_itself() -> None:
    request = check(list(range(20, 40)), [i >= 11 for i in range(20)], PARTIAL)
    transfer = request.loads(1, 3)
    assert transfer.chunk_tokens.tolist() == [8, 4]
    assert transfer.slots.tolist() == [NO_SLOT] * 3 + list(range(31, 40))
    assert request.slots.tolist() == list(range(20, 40))


def test_saves_move_every_chunk_whole() -> None:
    request = check(list(range(20, 40)), [i >= 11 for i in range(20)], PARTIAL)
    assert request.saves().chunk_tokens.tolist() == [8, 8, 4]
    assert request.saves().slots.tolist() == list(range(20, 40))


@given(st.integers(0, 26), st.integers(0, 26), st.sets(st.integers(0, 25)), st.booleans())
def test_a_chunk_can_be_stored_if_it_reaches_beyond_the_mask_and_has_all_slots(
    num_tokens: int, first: int, without: set[int], partial: bool
) -> None:
    first = min(first, num_tokens)
    slots = [NO_SLOT if i in without else i for i in range(num_tokens)]
    request = check(slots, [i >= first for i in range(num_tokens)], PARTIAL if partial else WHOLE)
    starts = range(0, num_tokens if partial else num_tokens - 7, 8)
    chunks = [range(start, min(start + 8, num_tokens)) for start in starts]
    wanted = [chunk[-1] >= first and not without & set(chunk) for chunk in chunks]
    assert request.new_chunks().tolist() == wanted


def test_where_only_whole_blocks_move_other_slots_are_refused() -> None:
    assert check([8, 9, 10, 11, *[NO_SLOT] * 4], chunking=OPAQUE).chunk_tokens.tolist() == [8]
    for slots in ([8, 9, 11, 10], [9, 10, 11, 12], [8, 9, 10, NO_SLOT]):
        with pytest.raises(RequestError, match=r"whole blocks of 4 tokens.*in order, or -1 for all"):
            check(slots, chunking=OPAQUE)


def test_where_only_whole_blocks_move_a_rest_is_left_alone() -> None:
    assert check([8, 9, 10, 11, 4, 5], chunking=OPAQUE).chunk_tokens.tolist() == [4]


def test_where_only_whole_blocks_move_a_mask_may_end_inside_a_block_of_a_store_but_not_of_a_load() -> None:
    inside = Request(range(8), list(range(8)), [i >= 2 for i in range(8)])
    [checked] = check_stores([inside], NUM_SLOTS, OPAQUE)
    assert checked.saves().slots.tolist() == list(range(8))
    with pytest.raises(RequestError, match="whole blocks of 4 tokens"):
        check_loads([inside], NUM_SLOTS, OPAQUE)


def test_where_only_whole_blocks_move_a_store_with_other_slots_is_refused_unless_its_chunk_is_left_out() -> (
    None
):
    scattered = [9, 10, 11, 12, 4, 5, 6, 7]
    with pytest.raises(RequestError, match="whole blocks of 4 tokens"):
        check_stores([Request(range(8), scattered)], NUM_SLOTS, OPAQUE)
    check_stores([Request(range(8), scattered, [False] * 8)], NUM_SLOTS, OPAQUE)
    check_stores([Request(range(8), [0, 1, 2, NO_SLOT, 4, 5, 6, 7])], NUM_SLOTS, OPAQUE)


@pytest.mark.parametrize("check_batch", [check_loads, check_stores])
@pytest.mark.parametrize(
    "other",
    [
        pytest.param(Request(range(3), [8, 4, 9]), id="another place"),
        pytest.param(Request([0, 1, 2, 7], [5, 6, 7, 4]), id="another token"),
        pytest.param(Request([9, 1, 2, 3], [5, 6, 7, 4]), id="another token before it"),
        pytest.param(Request(range(4), [5, 6, 7, 4], salts=["lora"]), id="other salts"),
        pytest.param(Request(range(3), [8, 4, 9], [False, False, True]), id="in its masked part"),
    ],
)
def test_a_slot_is_for_one_token_of_a_batch_only(check_batch: Any, other: Request) -> None:
    one, apart = Request(range(4), [1, 2, 3, 4]), Request(range(2), [20, NO_SLOT])
    for batch in ([one, other, apart], [other, apart, one]):
        with pytest.raises(RequestError, match="slot 4 is given to two tokens"):
            check_batch(batch, NUM_SLOTS, WHOLE)


@pytest.mark.parametrize("check_batch", [check_loads, check_stores])
def test_requests_of_a_batch_may_share_the_slots_of_a_prefix(check_batch: Any) -> None:
    requests = [
        Request([1, 2, 3, 4], [10, NO_SLOT, 12, 13], salts=["s"]),
        Request([1, 2, 3, 9], [10, NO_SLOT, 12, 3], salts=("s",)),
        Request([1, 2, 3, 9], [10, 5, 12, 3], salts=["s"]),
        Request([1, 2], [20, 21]),
    ]
    assert [len(request.slots) for request in check_batch(requests, NUM_SLOTS, WHOLE)] == [4, 4, 4, 2]


@pytest.mark.parametrize("check_batch", [check_loads, check_stores])
def test_each_request_of_a_batch_is_checked_where_others_share_slots(check_batch: Any) -> None:
    shared = [Request([1, 2], [4, 5]), Request([1, 2], [4, 5])]
    with pytest.raises(RequestError, match="slot 9 is given to two tokens of a request"):
        check_batch([*shared, Request([3, 3], [9, 9])], NUM_SLOTS, WHOLE)


@pytest.mark.parametrize("slots", [[2**64 - 1] * 3, [2**63, 0, 1], [0, 2**64 - 2, 1]])
def test_an_unsigned_slot_is_out_of_range_and_never_no_slot(slots: list[int]) -> None:
    with pytest.raises(RequestError, match="is out of range"):
        check(np.array(slots, np.uint64))
    with pytest.raises(RequestError, match=r"is out of range|must be whole numbers"):
        check(slots)


def test_slots_out_of_range_on_both_sides_cannot_pass_for_a_run() -> None:
    with pytest.raises(RequestError, match="is out of range"):
        check([0, 2**63 - 1, -(2**63)])


def test_requests_may_share_the_slots_of_a_prefix_that_the_engine_has_itself() -> None:
    requests = [
        Request(range(5), [1, 2, 3, 4, 5], [False] * 3 + [True] * 2),
        Request(range(4), [1, 2, 3, 8], [False] * 3 + [True]),
        Request([], []),
        Request(range(2), [1, 2], [False] * 2),
    ]
    checked = check_loads(requests, NUM_SLOTS, WHOLE)
    assert [request.first for request in checked] == [3, 3, 0, 2]
    assert check_loads([], NUM_SLOTS, WHOLE) == check_loads(requests[4:], NUM_SLOTS, WHOLE) == []
    with pytest.raises(RequestError, match=r"slot 64 is out of range"):
        check_loads([*requests, Request([7], [NUM_SLOTS])], NUM_SLOTS, WHOLE)
