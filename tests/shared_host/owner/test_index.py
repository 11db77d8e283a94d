"""Requests that no client makes: each is refused, and nothing is lost by it."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage.rig import keys

from lwkv.shared_host.owner.index import Client, NodeIndex
from lwkv.shared_host.protocol import (
    Message,
    Op,
    ProtocolError,
    pack_keys,
    pack_numbers,
    pack_parents,
    read_numbers,
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
    names = keys(*numbers)
    parts = [pack_keys(names), pack_parents([None, *names[:-1]]), pack_numbers(lengths), pack_numbers(pages)]
    index.handle(client, Message(Op.COMMIT, 0, [*parts, b""]))


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
