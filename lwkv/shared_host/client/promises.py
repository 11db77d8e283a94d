"""Has an owner hold chunks for engines: for whoever decides what these load, and copies nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from lwkv.keys import ChunkKey
from lwkv.shared_host.client.connecting import NoOwnerError, connect
from lwkv.shared_host.client.keeper import Keeper, Waker
from lwkv.shared_host.client.session import Pinned, Session
from lwkv.shared_host.greeting import Hello
from lwkv.telemetry.counters import Counters

END_S = 1.0
"""Seconds that the end of the connection is waited for."""


class Promised(NamedTuple):
    """What one client of an owner holds without having asked for it: it takes it over, or it is nobody's.

    Attributes:
        owner, client: who made the promise, and the number of the client that it was made for.
        pinned: the chunks, in the order in which they were asked for.
    """

    owner: str
    client: int
    pinned: Pinned

    def part(self, first: int, end: int) -> Promised:
        """The same of chunks [first, end); those that were beyond the room of a message are not there."""
        lengths = [*self.pinned.lengths[:end], *[0] * (end - len(self.pinned.lengths))]
        begin, count = sum(lengths[:first]), sum(lengths[first:end])
        pages = self.pinned.pages[begin : begin + count]
        spills = self.pinned.spills
        beside = {page: spills[page] for page in pages.tolist() if page in spills} if spills else {}
        return self._replace(pinned=Pinned(lengths[first:end], pages, beside))


class NodePromise(NamedTuple):
    """What an owner has promised to several clients.

    Attributes:
        there: for each, whether it can use each of the prompt's chunks; None for one that is not here.
        promised: for each, the chunks that it holds, from the first that was asked for on.
    """

    session: Session
    number: int
    there: Sequence[Sequence[bool] | None]
    promised: Sequence[Promised | None]

    @property
    def is_over(self) -> bool:
        """Whether its owner is gone, as far as is known: then nobody can load what it holds."""
        return self.session.connection.is_lost


class OwnerPromises:
    """A client of an owner that has no pages. Thread-safe.

    It is connected when an owner is there; a thread looks for a new one when that is gone.

    Attributes:
        session: the owner, if there is one.

    Raises:
        ConfigError: the owner cannot serve it.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        waker = Waker()
        open_session = partial(connect, path, Hello(0), timeout_s, waker)
        self.session: Session | None = None
        with suppress(NoOwnerError):  # engines wait for one, and the keeper looks for it
            self.session = open_session(timeout_s)
        self._keeper = Keeper(self, open_session, waker, Counters())

    def attach(self, session: Session) -> None:
        self.session = session

    def detach(self) -> None:
        self.session = None

    def promise(self, first: int, takers: Sequence[tuple[str, Sequence[ChunkKey]]]) -> NodePromise | None:
        """Have clients hold what is there of a prompt's chunks, from number `first` on, until `give`.

        Waits for the owner, as any request. None where none answers: then nothing is there.

        Args:
            takers: names of clients, each with its keys of all chunks; see NodePool.name.
        """
        session = self.session
        reply = None if session is None else session.promise(first, takers)
        if session is None or reply is None:
            return None
        there, pinned = iter(reply.there), iter(reply.pinned)
        is_here = [number >= 0 for number in reply.clients]
        promised = [
            Promised(session.welcome.owner, number, next(pinned)) if number >= 0 else None
            for number in reply.clients
        ]
        return NodePromise(
            session, reply.number, [next(there) if here else None for here in is_here], promised
        )

    def give(self, promise: NodePromise, first: int, end: int) -> bool:
        """Leave chunks [first, end) of a promise to the clients, and end the holds of all others.

        Returns False where that cannot be said now: then all holds end, and nobody may use them.
        """
        if end > first and promise.session.give(promise.number, first, end):
            return True
        promise.session.take_back(promise.number)
        return False

    def close(self) -> None:
        """End the connection; what was not given ends with it."""
        self._keeper.leave()
        self._keeper.join(END_S)
