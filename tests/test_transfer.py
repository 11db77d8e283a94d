"""Rows are numbered as pages and staging buffers lie in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lwkv.errors import RequestError
from lwkv.transfer import NO_SLOT, PageShape, Transfer

CHUNK = 6
transfers = st.lists(st.integers(1, CHUNK), max_size=7).flatmap(
    lambda counts: st.tuples(
        st.just(counts), st.lists(st.booleans(), min_size=sum(counts), max_size=sum(counts))
    )
)


def make(counts: list[int], moved: list[bool]) -> Transfer:
    slots = [100 + i if there else NO_SLOT for i, there in enumerate(moved)]
    return Transfer(np.array(counts, np.int64), np.array(slots, np.int64))


@given(transfers, st.integers(1, 4), st.sampled_from([1, 2]))
def test_every_moved_row_has_the_place_of_its_token(
    drawn: tuple[list[int], list[bool]], chunks_per_slice: int, parts: int
) -> None:
    transfer = make(*drawn)
    table, bounds = transfer.rows(PageShape(parts, CHUNK, 1), chunks_per_slice)
    wanted, starts, number = [], [], 0
    for chunk, count in enumerate(transfer.chunk_tokens.tolist()):
        if chunk % chunks_per_slice == 0:
            starts.append(len(wanted))
        page = chunk % chunks_per_slice * parts * CHUNK
        for token in range(count):
            slot = int(transfer.slots[number])
            number += 1
            if slot != NO_SLOT:
                wanted.append((slot, page + token, page + token + count))
    assert list(zip(*table.tolist(), strict=True)) == wanted
    assert bounds == [*starts, len(wanted)]
    assert table.flags.c_contiguous


@given(transfers, st.data())
def test_leaving_chunks_out_leaves_their_tokens_out(
    drawn: tuple[list[int], list[bool]], data: st.DataObject
) -> None:
    transfer = make(*drawn)
    kept = data.draw(st.lists(st.booleans(), min_size=len(drawn[0]), max_size=len(drawn[0])))
    rest = transfer.only(np.array(kept, bool))
    parts = np.split(transfer.slots, np.cumsum(transfer.chunk_tokens))[: len(kept)]
    wanted = [slot for part, keep in zip(parts, kept, strict=True) if keep for slot in part.tolist()]
    assert rest.slots.tolist() == wanted
    assert rest.num_chunks == sum(kept)


def test_joined_transfers_follow_each_other() -> None:
    joined = Transfer.join([make([2, 1], [True] * 3), make([], []), make([3], [False, True, True])])
    assert joined.chunk_tokens.tolist() == [2, 1, 3]
    assert joined.slots.tolist() == [100, 101, 102, NO_SLOT, 101, 102]
    assert Transfer.join([]).num_chunks == 0


def test_rows_of_whole_blocks_are_numbered_by_block() -> None:
    slots = [8, 9, 10, 11, *[NO_SLOT] * 4, 0, 1, 2, 3]
    transfer = Transfer(np.array([8, 4], np.int64), np.array(slots, np.int64))
    table, bounds = transfer.rows(PageShape(1, 2, 4), 1)
    assert table[:2].tolist() == [[2, 0], [0, 0]]
    assert bounds == [0, 1, 2]


@pytest.mark.parametrize("slots", [[1, 2, 3, 4], [0, 1, 3, 2], [0, 1, 2, NO_SLOT], [4, 5, 6, 8]], ids=str)
def test_a_block_that_is_not_whole_is_refused(slots: list[int]) -> None:
    transfer = Transfer(np.array([4], np.int64), np.array(slots, np.int64))
    with pytest.raises(RequestError, match="whole blocks of 4 tokens"):
        transfer.row_slots(4)


@given(transfers, st.data())
def test_slots_on_the_device_are_left_out_with_the_same_chunks_and_nothing_is_sent_there(
    drawn: tuple[list[int], list[bool]], data: st.DataObject
) -> None:
    counts, _ = drawn
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=len(counts), max_size=len(counts))), bool)
    numbers = np.arange(sum(counts))
    transfer = Transfer(np.array(counts, np.int64), numbers * 0, torch.from_numpy(numbers))
    with pytest.MonkeyPatch.context() as patch:
        # From memory that is not page-locked either waits for the device's stream.
        for name in ("to", "copy_"):
            patch.setattr(torch.Tensor, name, None)
        rest = transfer.only(kept)
    assert rest.device_slots is not None
    assert rest.device_slots.tolist() == numbers[np.repeat(kept, counts)].tolist()
