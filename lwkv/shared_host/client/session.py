"""What a client asks of the owner, and reports to it. Page numbers are the owner's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from lwkv.keys import ChunkKey
from lwkv.platforms.protocol import Int64s
from lwkv.shared_host.client.connection import Connection
from lwkv.shared_host.greeting import Welcome
from lwkv.shared_host.protocol import (
    MOST_KEYS,
    MOST_PAGES,
    Message,
    Op,
    State,
    pack_keys,
    pack_numbers,
    pack_parents,
    pack_spills,
    read_keys,
    read_numbers,
    read_spills,
)

_HEAD = 2
"""Parts of every reply before those of its own: the state, and what was evicted."""


class Pinned(NamedTuple):
    """How many pages each chunk has, 0 for one that is not there; all pages; what is beside them."""

    lengths: Sequence[int]
    pages: Int64s
    spills: Mapping[int, Int64s]


class PromiseReply(NamedTuple):
    """What the owner says of a promise.

    Attributes:
        number: names it in `give`.
        clients: the numbers of those that it is for, below 0 for one that is not at this owner.
        there: of those that are, whether each chunk of the prompt is there.
        pinned: of these, what each holds, from the first chunk that was asked for on.
    """

    number: int
    clients: Sequence[int]
    there: Sequence[Sequence[bool]]
    pinned: Sequence[Pinned]


class Session:
    """One owner, from its greeting to its end. Thread-safe.

    Requests return None where the owner does not answer in time; see Connection.

    Args:
        memory: uint8 (bytes,), the owner's; empty for a client that only asks.

    Attributes:
        state: of the reply to the last request that was answered.
        watcher: called with the packed keys of chunks that were evicted, on any thread; it must not block.
    """

    def __init__(self, connection: Connection, welcome: Welcome, memory: torch.Tensor) -> None:
        self.connection = connection
        self.welcome = welcome
        self.memory = memory
        self.state = State()
        self._state_of = 0
        self._state_lock = threading.Lock()
        self.watcher: Callable[[list[bytes]], object] | None = None

    def has(self, end: int, keys: Sequence[ChunkKey]) -> list[bool] | None:
        """Whether each chunk is there, with all its pages below page `end`."""
        parts = self._ask(Op.HAS, [pack_numbers([end]), pack_keys(keys[:MOST_KEYS])], lambda _: None)
        return None if parts is None else [bool(there) for there in _padded([*parts[0]], len(keys))]

    def announce(self) -> None:
        """Say that a request comes at once: the owner wakes up meanwhile."""
        self.connection.tell_at_once(Op.SOON)

    def pin(self, end: int, keys: Sequence[ChunkKey], op: Op = Op.PIN) -> Pinned | None:
        """Hold the chunks that are there, with all their pages below page `end`; `op` is a kind of PIN."""
        parts = self._ask(op, [pack_numbers([end]), pack_keys(keys[:MOST_KEYS])], self._free_late_pin)
        if parts is None:
            return None
        lengths = _padded(read_numbers(parts[0]).tolist(), len(keys))
        return Pinned(lengths, read_numbers(parts[1]), read_spills(parts[2]))

    def promise(self, first: int, takers: Sequence[tuple[str, Sequence[ChunkKey]]]) -> PromiseReply | None:
        """Have other clients hold what is there of a prompt's chunks, from number `first` on, until `give`.

        Args:
            takers: up to MOST_TAKERS names of clients, each with the keys of all chunks.
        """
        most = MOST_KEYS // len(takers)
        parts = [pack_numbers([first])]
        for name, keys in takers:
            parts += [name.encode(), pack_keys(keys[:most])]
        reply = self._ask(Op.PROMISE, parts, self._end_late_promise)
        return None if reply is None else _read_promise(reply)

    def give(self, number: int, first: int, end: int) -> bool:
        """Leave chunks [first, end) of a promise, as counted from its first, to those that it was made for.

        Returns False where the owner may not learn of it: then nobody may use them.
        """
        return self.connection.tell_surely(Op.GIVE, pack_numbers([number, first, end]))

    def take_back(self, number: int) -> None:
        """End all holds of a promise."""
        self.connection.tell(Op.GIVE, pack_numbers([number, 0, 0]))

    def usable(self, end: int) -> None:
        """Note that this client can use all pages below page `end`: they may be promised to it."""
        self.connection.tell(Op.USABLE, pack_numbers([end]))

    def reserve(self, end: int, count: int) -> tuple[Int64s | None, int]:
        """Hold `count` pages that are nobody's, all below page `end`; else None, and how many there could be.

        Chunks are evicted for them.
        """
        parts = self._ask(Op.RESERVE, [pack_numbers([end]), pack_numbers([count])], self._free_late_pages)
        if parts is None:
            return None, 0
        pages = read_numbers(parts[0])
        return (pages, 0) if len(pages) else (None, int(read_numbers(parts[1])[0]))

    def commit(
        self,
        keys: Sequence[ChunkKey],
        parents: Sequence[ChunkKey | None],
        lengths: Sequence[int],
        pages: Int64s,
        spills: Mapping[int, Int64s],
    ) -> None:
        """Make chunks visible whose pages this client holds, and goes on to hold until `free`.

        Args:
            lengths: how many of `pages`, int64 (pages,), each chunk has.
        """
        for part, inside in _parts(lengths, pages, spills):
            own = pages[inside]
            beside = {page: spills[page] for page in own.tolist() if page in spills} if spills else {}
            packed = pack_keys(keys[part]), pack_parents(parents[part]), pack_numbers(lengths[part])
            self.connection.tell(Op.COMMIT, *packed, pack_numbers(own), pack_spills(beside))
        self.connection.push()  # whoever hears of them next, and asks the owner, is to find them

    def free(self, pages: Int64s, counts: Int64s) -> None:
        """End `counts` holds of each of `pages`."""
        for first in range(0, len(pages), MOST_PAGES):
            part = slice(first, first + MOST_PAGES)
            self.connection.tell(Op.FREE, pack_numbers(pages[part]), pack_numbers(counts[part]))

    def use(self, keys: Sequence[ChunkKey]) -> None:
        """Note that chunks of a prompt are used; not while the owner is stopped, which may be for ever."""
        if keys and not self.connection.is_resting:
            self.connection.tell(Op.USE, pack_keys(keys[:MOST_KEYS]))

    def status(self) -> bytes | None:
        """What there is, as JSON for people."""
        parts = self._ask(Op.STATUS, [], lambda _: None)
        return None if parts is None else parts[0]

    def bye(self) -> None:
        """Say that this client holds nothing any more."""
        self.connection.tell(Op.BYE)

    def _ask(
        self, op: Op, parts: Sequence[bytes], late: Callable[[Sequence[bytes]], object]
    ) -> Sequence[bytes] | None:
        reply = self.connection.ask(op, parts, lambda message: late(self._take(message)))
        return None if reply is None else self._take(reply)

    def _take(self, reply: Message) -> Sequence[bytes]:
        """Take over what every reply says; its own parts."""
        state = State(*read_numbers(reply.parts[0]).tolist())
        with self._state_lock:
            if reply.number > self._state_of:  # another thread may be ahead with a later one
                self.state, self._state_of = state, reply.number
        if reply.parts[1] and self.watcher is not None:
            self.watcher(read_keys(reply.parts[1]))
        return reply.parts[_HEAD:]

    def _free_late_pin(self, parts: Sequence[bytes]) -> None:
        pages, counts = np.unique(read_numbers(parts[1]), return_counts=True)
        self.free(pages, counts)

    def _free_late_pages(self, parts: Sequence[bytes]) -> None:
        pages = read_numbers(parts[0])
        self.free(pages, np.ones(len(pages), np.int64))

    def _end_late_promise(self, parts: Sequence[bytes]) -> None:
        self.take_back(_read_promise(parts).number)


def _read_promise(parts: Sequence[bytes]) -> PromiseReply:
    number, *clients = read_numbers(parts[0]).tolist()
    there, lengths, pages, spills = (parts[1 + i :: 4] for i in range(4))
    pinned = [
        Pinned(read_numbers(own).tolist(), read_numbers(numbers), read_spills(beside))
        for own, numbers, beside in zip(lengths, pages, spills, strict=True)
    ]
    return PromiseReply(number, clients, [[bool(is_there) for is_there in own] for own in there], pinned)


def _padded(answers: list[int], count: int) -> list[int]:
    """As many answers as there were keys: those that were not asked for are not there."""
    return [*answers, *[0] * (count - len(answers))]


def _parts(
    lengths: Sequence[int], pages: Int64s, spills: Mapping[int, Int64s]
) -> Iterator[tuple[slice, slice]]:
    """Chunks that one message has room for, and their pages: positions of both."""
    ends = [0, *accumulate(lengths)]
    numbers = [0, *accumulate(_numbers_for(page, spills) for page in pages.tolist())] if spills else None
    sizes = ends if numbers is None else [numbers[end] for end in ends]
    first = 0
    while first < len(lengths):
        last = first + 1
        while last < len(lengths) and _fits(last + 1 - first, sizes[last + 1] - sizes[first]):
            last += 1
        yield slice(first, last), slice(ends[first], ends[last])
        first = last


def _fits(num_chunks: int, num_numbers: int) -> bool:
    return num_chunks <= MOST_KEYS // 2 and num_numbers <= MOST_PAGES


def _numbers_for(page: int, spills: Mapping[int, Int64s]) -> int:
    """How many numbers a message has for a page of a chunk and what is beside it; see `pack_spills`."""
    return 3 + len(spills[page]) if page in spills else 1
