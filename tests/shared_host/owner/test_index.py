"""Requests that no client makes: each is refused, and nothing is lost by it."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage.rig import keys

from lwkv.shared_host.owner import index as owner_index
from lwkv.shared_host.owner.index import Client, NodeIndex
from lwkv.shared_host.owner.slabs import SlabOwners
from lwkv.shared_host.protocol import (
    Message,
    Op,
    ProtocolError,
    pack_keys,
    pack_numbers,
    pack_parents,
    pack_spills,
    read_numbers,
    read_spills,
)

PAGES = 12
ALL = pack_numbers([PAGES])
NUMBERS = st.lists(st.integers(-2, PAGES + 2) | st.sampled_from([2**62, -(2**63)]), max_size=5)
PARTS = NUMBERS.map(pack_numbers) | st.binary(max_size=70) | st.just(pack_keys(keys(1, 2))) | st.just(ALL)


def reserve(index: NodeIndex, client: Client, count: int) -> list[int]:
    answer = index.handle(client, Message(Op.RESERVE, 1, [ALL, pack_numbers([count])]))
    assert answer is not None
    pages: list[int] = read_numbers(answer[0]).tolist()
    return pages


def commit(index: NodeIndex, client: Client, pages: list[int], lengths: list[int], *numbers: int) -> None:
    commit_with(index, client, pages, lengths, {}, *numbers)


def commit_with(
    index: NodeIndex,
    client: Client,
    pages: list[int],
    lengths: list[int],
    spills: dict[int, list[int]],
    *numbers: int,
) -> None:
    names, beside = keys(*numbers), {page: np.array(spill) for page, spill in spills.items()}
    parts = [pack_keys(names), pack_parents([None, *names[:-1]]), pack_numbers(lengths), pack_numbers(pages)]
    index.handle(client, Message(Op.COMMIT, 0, [*parts, pack_spills(beside)]))


def test_a_client_can_use_no_fewer_than_no_pages() -> None:
    index = NodeIndex(PAGES, 5)
    with pytest.raises(ProtocolError, match="got -1 pages that a client can use; allowed: 0 or more"):
        index.handle(index.client(), Message(Op.RESERVE, 1, [pack_numbers([-1]), pack_numbers([1])]))


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(Op), st.lists(PARTS, max_size=6)), max_size=8))
def test_any_request_is_answered_or_refused_and_a_client_that_is_gone_leaves_no_hold(
    requests: list[tuple[Op, list[bytes]]],
) -> None:
    index = NodeIndex(PAGES, 5)
    client, other = index.client(), index.client()
    kept = reserve(index, other, 4)
    commit(index, other, kept, [2, 2], 1, 2)
    for op, parts in requests:
        with suppress(ProtocolError):
            index.handle(client, Message(op, 1, parts))
        assert other.holds.num_pages == 4
    client.holds.end_all()
    other.holds.end_all()
    in_chunks = sum(len(chunk.pages) for chunk in index.tier._chunks.values())
    assert index.pages.references == PAGES - index.pages.num_free == in_chunks
    assert index.tier.contains([]) == []


def test_pages_that_a_client_does_not_hold_are_neither_kept_nor_freed_for_it() -> None:
    index = NodeIndex(PAGES, 5)
    client, other = index.client(), index.client()
    pages = reserve(index, other, 2)
    with pytest.raises(ProtocolError, match="does not hold all"):
        commit(index, client, pages, [2], 1)
    with pytest.raises(ProtocolError, match="does not hold all"):
        index.handle(client, Message(Op.FREE, 0, [pack_numbers(pages), pack_numbers([1, 1])]))
    with pytest.raises(ProtocolError, match="does not hold all"):
        index.handle(other, Message(Op.FREE, 0, [pack_numbers(pages), pack_numbers([1, 2])]))
    assert other.holds.num_pages == 2


def test_a_client_without_pages_may_only_look() -> None:
    index = NodeIndex(PAGES, 5)
    assert index.handle(None, Message(Op.HAS, 1, [ALL, pack_keys(keys(1))])) == [b"\0"]
    with pytest.raises(ProtocolError, match="PIN of a client without pages"):
        index.handle(None, Message(Op.PIN, 1, [ALL, pack_keys(keys(1))]))


def test_a_client_hears_of_each_eviction_once() -> None:
    index = NodeIndex(PAGES, 5)
    client, other = index.client(), index.client()
    pages = reserve(index, client, 4)
    commit(index, client, pages, [2, 2], 1, 2)
    client.holds.end(np.array(pages), np.ones(4, np.int64))
    assert (client.news(), other.news()) == (b"", b"")
    assert len(reserve(index, other, 10)) == 10
    assert client.news() == other.news() == pack_keys(keys(2))
    assert client.news() == b""


@pytest.mark.parametrize("count", [PAGES - 1, PAGES, PAGES + 1, 10 * PAGES])
def test_who_asks_for_more_than_can_be_had_hears_how_much_can(count: int) -> None:
    index = NodeIndex(PAGES, 5)
    client, other = index.client(), index.client()
    held = reserve(index, other, 2)
    pages = reserve(index, client, 8)
    commit(index, client, pages, [2, 2, 4], 1, 2, 3)
    free(index, client, pages)
    answer = index.handle(client, Message(Op.RESERVE, 1, [ALL, pack_numbers([count])]))
    assert answer is not None
    assert (answer[0], read_numbers(answer[1]).tolist()) == (b"", [PAGES - len(held)])
    there = index.handle(client, Message(Op.HAS, 1, [ALL, pack_keys(keys(1, 2, 3))]))
    assert there == [b"\1" * 3], "nothing goes that is of no use"
    assert len(reserve(index, client, PAGES - len(held))) == PAGES - len(held)


def free(index: NodeIndex, client: Client, pages: list[int]) -> None:
    index.handle(client, Message(Op.FREE, 0, [pack_numbers(pages), pack_numbers([1] * len(pages))]))


def require_all_in_chunks(index: NodeIndex) -> None:
    """Fail unless every page in use is a chunk's, or beside one of its pages, and has that one reference."""
    in_chunks = [chunk.pages for chunk in index.tier._chunks.values()]
    beside = [spill for pages in in_chunks for spill in index.pages.spills_of(pages).values()]
    total = sum(map(len, [*in_chunks, *beside]))
    assert index.pages.references == PAGES - index.pages.num_free == total


def test_pages_of_a_chunk_are_not_made_another_chunk_s_too() -> None:
    index = NodeIndex(PAGES, 5)
    client, other = index.client(), index.client()
    commit(index, other, reserve(index, other, 2), [2], 1)
    other.holds.end_all()
    answer = index.handle(client, Message(Op.PIN, 1, [ALL, pack_keys(keys(1))]))
    assert answer is not None
    with pytest.raises(ProtocolError, match="of a chunk already, or held by others"):
        commit(index, client, read_numbers(answer[1]).tolist(), [2], 7)
    client.holds.end_all()
    require_all_in_chunks(index)
    # Else neither of the two could ever be evicted.
    assert len(reserve(index, other, PAGES)) == PAGES


@pytest.mark.parametrize(
    "spills",
    [{9: [2]}, {-1: [2]}, {0: [1]}, {0: [0]}, {0: [2, 2]}, {0: [3]}, {3: [2]}],
    ids=["not a page", "below 0", "a page of the chunk", "itself", "twice", "beside another", "another's"],
)
def test_a_commit_with_pages_beside_others_that_cannot_be_is_refused_and_changes_nothing(
    spills: dict[int, list[int]],
) -> None:
    index = NodeIndex(PAGES, 5)
    client, other = index.client(), index.client()
    assert reserve(index, client, 3) == [0, 1, 2]
    commit_with(index, other, [reserve(index, other, 1)[0]], [1], {3: reserve(index, other, 1)}, 9)
    with pytest.raises(ProtocolError):
        commit_with(index, client, [0, 1], [2], spills, 1)
    client.holds.end_all()
    other.holds.end_all()
    require_all_in_chunks(index)
    assert index.pages.num_free == PAGES - 2


def test_a_page_is_beside_one_other_only_and_none_is_lost() -> None:
    index = NodeIndex(PAGES, 5)
    client = index.client()
    pages = reserve(index, client, 5)
    commit_with(index, client, [0], [1], {0: [1]}, 1)
    with pytest.raises(ProtocolError):
        commit_with(index, client, [2], [1], {2: [1]}, 2)
    commit_with(index, client, [2], [1], {2: [3]}, 1)  # the chunk is there: this page is none of its own
    with pytest.raises(ProtocolError, match="have others beside them"):
        commit_with(index, client, [2], [1], {2: [4]}, 2)
    free(index, client, pages)
    require_all_in_chunks(index)
    assert index.pages.num_free == PAGES - 2
    assert index.tier.evict(1)
    assert index.pages.num_free == PAGES


def test_a_chunk_is_found_where_the_pages_beside_it_can_be_used_too() -> None:
    index = NodeIndex(PAGES, 5)
    client, other = index.client(), index.client()
    reserve(index, client, 8)
    commit_with(index, client, [0, 1], [2], {1: [7]}, 1)
    for end, there in ((7, 0), (8, 1)):
        limit = pack_numbers([end])
        assert index.handle(other, Message(Op.HAS, 1, [limit, pack_keys(keys(1))])) == [bytes([there])]
        for op in (Op.PIN, Op.PIN_PREFIX):
            answer = index.handle(other, Message(op, 1, [limit, pack_keys(keys(1))]))
            assert answer is not None
            assert read_numbers(answer[0]).tolist() == [2 * there]
            assert list(read_spills(answer[2])) == [1] * there


@pytest.mark.parametrize("op", [Op.PIN, Op.PIN_PREFIX])
def test_chunks_that_a_reply_has_no_room_for_are_not_found(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_index, "MOST_PINNED", 7)
    index = NodeIndex(PAGES, 5)
    client = index.client()
    for number in range(1, 5):
        commit(index, client, reserve(index, client, 2), [2], number)
    client.holds.end_all()
    answer = index.handle(client, Message(op, 1, [ALL, pack_keys(keys(1, 2, 3, 4))]))
    assert answer is not None
    assert read_numbers(answer[0]).tolist() == [2, 2, 2, 0]
    assert len(read_numbers(answer[1])) == client.holds.num_pages == 6
    client.holds.end_all()
    require_all_in_chunks(index)
    assert index.tier.pins == 0


@pytest.mark.parametrize("op", [Op.PIN, Op.PIN_PREFIX])
def test_what_is_beside_pages_counts_for_the_room_of_a_reply(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_index, "MOST_PINNED", 9)
    index = NodeIndex(PAGES, 5)
    client = index.client()
    for number in (1, 2, 3):
        first, second, beside = reserve(index, client, 3)
        commit_with(index, client, [first, second], [2], {second: [beside]}, number)
    client.holds.end_all()
    answer = index.handle(client, Message(op, 1, [ALL, pack_keys(keys(1, 2, 3))]))
    assert answer is not None
    assert read_numbers(answer[0]).tolist() == [2, 0, 0]  # 5 numbers each: 2 pages, and 3 for what is beside
    assert len(read_numbers(answer[1])) + len(read_numbers(answer[2])) == 5
    client.holds.end_all()
    require_all_in_chunks(index)


def test_a_pinned_chunk_is_held_before_the_next_request_can_evict_it() -> None:
    index = NodeIndex(PAGES, 5)
    client, other = index.client(), index.client()
    commit(index, client, reserve(index, client, 4), [2, 2], 1, 2)
    client.holds.end_all()
    answer = index.answer(client, Message(Op.PIN, 1, [ALL, pack_keys(keys(2, 1, 2))]))
    assert answer is not None
    assert client.holds.num_pages == 0
    index.settle()
    assert client.holds.num_pages == 4
    index.settle()
    assert reserve(index, other, PAGES - 3) == []
    client.holds.end_all()
    require_all_in_chunks(index)


def test_a_slab_is_not_cut_anew_while_a_client_has_but_what_is_beside_the_page_of_a_chunk() -> None:
    slabs = SlabOwners(2 * 400, 400)
    small, large = NodeIndex(8, 4, slabs), NodeIndex(4, 2, slabs)
    writer, other = small.client(), large.client()
    first, beside, *rest = reserve(small, writer, 4)
    commit_with(small, writer, [first], [1], {first: [beside]}, 1)
    free(small, writer, [first, *rest])
    assert len(reserve(large, other, 2)) == 2, "the slab that nobody has"
    assert reserve(large, other, 2) == []
    assert small.state().chunks == 1
    assert small.pages.num_used_in(0) == 2
    free(small, writer, [beside])
    assert len(reserve(large, other, 2)) == 2
    assert small.state().chunks == 0
    assert (small.pages.num_there, small.pages.references) == (0, 0)
