from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lwkv.errors import RequestError
from lwkv.reference import BlockAllocator


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=40))
def test_no_block_is_ever_held_twice_and_none_is_lost(steps: list[tuple[bool, int]]) -> None:
    allocator, held = BlockAllocator(7), []
    for take, count in steps:
        if take and count <= allocator.num_free:
            held.append(allocator.take(count))
        elif not take and held:
            allocator.free(held.pop(count % len(held)))
        blocks = [block for group in held for block in group]
        assert len(set(blocks)) == len(blocks)
        assert len(blocks) + allocator.num_free == 7
        assert all(0 <= block < 7 for block in blocks)


def test_the_block_freed_last_is_taken_first() -> None:
    allocator = BlockAllocator(5)
    assert allocator.take(3) == [0, 1, 2]
    allocator.free([1, 0])
    assert allocator.take(3) == [0, 1, 3]


def test_more_blocks_than_are_free_are_refused_and_none_is_taken() -> None:
    allocator = BlockAllocator(3)
    allocator.take(1)
    with pytest.raises(RequestError, match="3 blocks wanted, 2 of 3 are free"):
        allocator.take(3)
    assert allocator.num_free == 2


@pytest.mark.parametrize("block", [1, -1, 3])
def test_a_block_that_is_free_or_foreign_cannot_be_freed(block: int) -> None:
    allocator = BlockAllocator(3)
    allocator.take(1)
    with pytest.raises(RequestError, match=f"block {block} cannot be freed"):
        allocator.free([block])
