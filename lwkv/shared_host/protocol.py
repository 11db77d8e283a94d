"""The messages between the owner of a node's host memory and its clients.

A message is a frame: its length, what it asks for, a number, and parts of bytes. Nothing in it is code or the
path of a file. A request gets one reply with its number; a note, which has number 0, gets none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from lwkv.errors import LwkvError
from lwkv.keys import HASH_BYTES, ChunkKey
from lwkv.platforms.protocol import Int64s

VERSION = 4
"""Goes up when messages change: owner and clients of different versions do not talk."""

MOST_BYTES = 64 << 20
"""Of a message to a client; one that says it is longer is none."""

MOST_REQUEST_BYTES = 16 << 20
"""Of a message to the owner."""

MOST_PAGES = 1 << 19
"""That one message to the owner names, so that it fits; what has more goes in several."""

MOST_KEYS = 1 << 18
"""That one message to the owner names. Chunks behind these are not found."""

MOST_TAKERS = 60
"""Clients that one promise is for: a message has up to 255 parts."""

FIRST_BYTES = 4096
"""Of the first message to an owner, from somebody it does not know."""

KEY_BYTES = 2 * HASH_BYTES
NO_KEY = bytes(KEY_BYTES)
"""Stands for the chunk before the first one of a prompt."""

_HEAD = struct.Struct("<IBIB")
_LENGTH = struct.Struct("<I")


class ProtocolError(LwkvError):
    """What came is no message, or asks for what is not the sender's."""


class Op(IntEnum):
    """What a message asks for. Parts in order; numbers are int64, keys are packed."""

    HELLO = 1
    """JSON of a Hello. The reply is WELCOME or REFUSED."""
    WELCOME = 2
    """JSON of a Welcome; the descriptor of the memory comes with it."""
    REFUSED = 3
    """Why, as text."""
    REPLY = 4
    """The State, keys of chunks that were evicted, then what the request says."""
    HAS = 5
    """The end of the pages that the client can use, and keys. The reply has a byte for each key, 1 if the
    chunk is there."""
    PIN = 6
    """The same. The reply has for each key the number of its pages, 0 if it is not there; all pages; spills.
    Every page has one hold more of this client."""
    RESERVE = 7
    """The end as above, and how many pages. The reply has the pages, each with one hold; or none, and how
    many there could be."""
    COMMIT = 8
    """Note: keys, keys of the chunks before them, numbers of pages, all pages, spills."""
    FREE = 9
    """Note: pages, and how many holds of each end."""
    USE = 10
    """Note: keys of a prompt's chunks that are used."""
    STATUS = 11
    """Nothing. The reply is JSON for people."""
    PIN_PREFIX = 13
    """As PIN, for the leading ones that are there; they do not count as used."""
    BYE = 12
    """Note: nobody of this client reads or writes a page any more."""
    SOON = 14
    """Note: a request comes at once. The owner stays awake for it for AWAKE_S at most."""
    USABLE = 15
    """Note: the end of the pages that the client can use. What is promised to it is below."""
    PROMISE = 16
    """Of a client without pages: a chunk's number, then names of clients, each with the keys of all chunks of
    a prompt. The chunks from that number on that are there have one hold more of each of these clients, and
    all of the prompt count as used. The reply has the promise's number and those of the clients, below 0 for
    one that is not there; then for each of the others a byte for each key as HAS, and what PIN says of those
    from that number on."""
    GIVE = 17
    """Note of the client that was promised: the promise's number, and those of its chunks [first, end), as
    counted from its first, that the clients use from now on as if each had pinned them itself. The holds of
    its other chunks end. Promises that are not given end with the connection."""


class Message(NamedTuple):
    op: Op
    number: int
    parts: Sequence[bytes]


class State(NamedTuple):
    """What the owner has, as every reply says it."""

    chunks: int = 0
    pages_in_use: int = 0
    evicted: int = 0


def pack(op: Op, number: int, parts: Sequence[bytes]) -> bytes:
    """Make the frame of a message."""
    lengths = b"".join([_LENGTH.pack(len(part)) for part in parts])
    size = _HEAD.size - _LENGTH.size + len(lengths) + sum(map(len, parts))
    return b"".join([_HEAD.pack(size, op, number, len(parts)), lengths, *parts])


class Frames:
    """Takes what a socket gives and has the messages that are whole.

    Attributes:
        most_bytes: that a message may have.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Take `data`; the messages that are whole by now. Raises ProtocolError."""
        self._data += data
        while len(self._data) >= _HEAD.size:
            size, op, number, count = _HEAD.unpack_from(self._data)
            end = size + _LENGTH.size
            if size > self.most_bytes or end < _HEAD.size:
                raise ProtocolError(
                    f"got a message of {size} bytes; allowed: {_HEAD.size} to {self.most_bytes}"
                )
            if len(self._data) < end:
                return
            frame = bytes(self._data[:end])
            del self._data[:end]
            yield Message(_op(op), number, _parts(frame, count))


def _op(number: int) -> Op:
    try:
        return Op(number)
    except ValueError as error:
        raise ProtocolError(f"got message {number}; allowed: 1 to {max(Op)}") from error


def _parts(frame: bytes, count: int) -> list[bytes]:
    start = _HEAD.size + count * _LENGTH.size
    if start > len(frame):
        raise ProtocolError(f"got {count} parts in a message of {len(frame)} bytes")
    parts = []
    for (length,) in _LENGTH.iter_unpack(frame[_HEAD.size : start]):
        parts.append(frame[start : start + length])
        start += length
    if start != len(frame):
        raise ProtocolError(f"got a message of {len(frame)} bytes whose parts end at {start}")
    return parts


def pack_numbers(numbers: Sequence[int] | Int64s) -> bytes:
    return np.asarray(numbers, "<i8").tobytes()


def read_numbers(part: bytes) -> Int64s:
    """Raises ProtocolError."""
    if len(part) % 8:
        raise ProtocolError(f"got {len(part)} bytes as int64 numbers")
    return np.frombuffer(part, "<i8").astype(np.int64)


@lru_cache(maxsize=1024)
def name_of(namespace: str) -> bytes:
    """What stands for a namespace in packed keys."""
    return blake2b(namespace.encode(), digest_size=HASH_BYTES, person=b"lwkv host name").digest()


def pack_keys(keys: Sequence[ChunkKey]) -> bytes:
    return b"".join([name_of(key.namespace) + key.hash for key in keys])


def pack_parents(parents: Sequence[ChunkKey | None]) -> bytes:
    return b"".join([NO_KEY if key is None else name_of(key.namespace) + key.hash for key in parents])


def read_keys(part: bytes) -> list[bytes]:
    """Raises ProtocolError."""
    if len(part) % KEY_BYTES:
        raise ProtocolError(f"got {len(part)} bytes as keys of {KEY_BYTES} bytes")
    return [part[i : i + KEY_BYTES] for i in range(0, len(part), KEY_BYTES)]


def pack_spills(spill_of: Mapping[int, Int64s]) -> bytes:
    """Pages that have others beside them: each, how many, and these."""
    return pack_numbers([n for page, spill in spill_of.items() for n in (page, len(spill), *spill.tolist())])


def read_spills(part: bytes) -> dict[int, Int64s]:
    """Raises ProtocolError."""
    numbers, spills, at = read_numbers(part), {}, 0
    while at < len(numbers):
        if at + 2 > len(numbers) or not 0 <= numbers[at + 1] <= len(numbers) - at - 2:
            raise ProtocolError(f"got {len(numbers)} numbers that are no spills")
        end = at + 2 + int(numbers[at + 1])
        spills[int(numbers[at])] = numbers[at + 2 : end]
        at = end
    return spills
