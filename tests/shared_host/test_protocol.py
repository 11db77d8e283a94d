from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage.rig import keys

from lwkv.keys import ChunkKey
from lwkv.shared_host.protocol import (
    KEY_BYTES,
    MOST_BYTES,
    NO_KEY,
    Frames,
    Message,
    Op,
    ProtocolError,
    pack,
    pack_keys,
    pack_numbers,
    pack_parents,
    pack_spills,
    read_keys,
    read_numbers,
    read_spills,
)

MESSAGES = st.builds(
    Message, st.sampled_from(Op), st.integers(0, 2**32 - 1), st.lists(st.binary(max_size=40), max_size=6)
)


@settings(deadline=None)
@given(st.lists(MESSAGES, max_size=5), st.lists(st.integers(1, 50), max_size=20))
def test_messages_come_out_whole_however_they_are_cut(messages: list[Message], sizes: list[int]) -> None:
    data = b"".join(pack(*message) for message in messages)
    frames, found = Frames(), []
    for size in [*sizes, len(data)]:
        found += list(frames.feed(data[:size]))
        data = data[size:]
    assert [(m.op, m.number, list(m.parts)) for m in found] == [tuple(m) for m in messages]


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_what_is_no_message_is_refused_or_waited_for(data: bytes) -> None:
    try:
        for message in Frames().feed(data):
            assert isinstance(message.op, Op)
    except ProtocolError:
        pass


@pytest.mark.parametrize("size", [0, 5, MOST_BYTES + 1])
def test_sizes_that_no_message_has_are_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match="allowed"):
        list(Frames().feed(size.to_bytes(4, "little") + bytes([Op.HAS, 0, 0, 0, 0, 0])))


def test_keys_of_two_namespaces_differ_and_a_first_chunk_has_no_parent() -> None:
    one, other = (ChunkKey(name, bytes(16)) for name in ("a", "b"))
    packed = read_keys(pack_keys([one, other]))
    assert len(set(packed)) == 2
    assert {len(key) for key in packed} == {KEY_BYTES}
    assert read_keys(pack_parents([None, *keys(1)])) == [NO_KEY, *read_keys(pack_keys(keys(1)))]


def test_numbers_and_spills_come_back() -> None:
    assert read_numbers(pack_numbers([1, -5, 2**40])).tolist() == [1, -5, 2**40]
    spills = {3: np.array([7, 8]), 9: np.array([1])}
    assert {page: spill.tolist() for page, spill in read_spills(pack_spills(spills)).items()} == {
        3: [7, 8],
        9: [1],
    }


@pytest.mark.parametrize("numbers", [[1], [1, 2, 3], [1, -1], [1, 1, 5, 2]])
def test_numbers_that_are_no_spills_are_refused(numbers: list[int]) -> None:
    with pytest.raises(ProtocolError, match="no spills"):
        read_spills(pack_numbers(numbers))


@pytest.mark.parametrize("read", [read_numbers, read_keys])
def test_bytes_that_are_cut_are_refused(read: object) -> None:
    with pytest.raises(ProtocolError, match="got 9 bytes"):
        read(bytes(9))  # type: ignore[operator]
