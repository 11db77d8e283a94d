"""Chunks that one client has promised to others: they hold them before they have heard of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from lwkv.platforms.protocol import Int64s
from lwkv.shared_host.owner.index import Client
from lwkv.shared_host.protocol import (
    KEY_BYTES,
    MOST_TAKERS,
    Message,
    ProtocolError,
    pack_numbers,
    read_numbers,
)

NOBODY = -1
"""Stands for the number of a client that is not there."""


class Taker(NamedTuple):
    """A client that holds promised chunks: the pages of each, none for one that is not there."""

    client: Client
    chunks: Sequence[Int64s]


class UngivenPromises:
    """What one client has promised and not given yet. For one thread.

    The holds are the takers' own. Here is only which of them end if the promise is never given: when the
    client takes it back, or has ended its connection.
    """

    def __init__(self) -> None:
        self._open: dict[int, Sequence[Taker]] = {}
        self._last = 0

    @property
    def num_chunks(self) -> int:
        """Of all takers together."""
        takers = [taker for some in self._open.values() for taker in some]
        return sum(bool(len(pages)) for taker in takers for pages in taker.chunks)

    def answer(self, request: Message, find: Callable[[str], Client | None]) -> list[bytes]:
        """Promise chunks: the parts of the reply. The takers' indexes are to be settled next.

        Args:
            find: the client of a name.
        """
        first, names, keys = _read(request)
        clients = [find(name) for name in names]
        named = [(client, own) for client, own in zip(clients, keys, strict=True) if client is not None]
        answers = [client.index.promise(client, own, first, len(named)) for client, own in named]
        self._last += 1
        self._open[self._last] = [
            Taker(client, answer.chunks) for (client, _), answer in zip(named, answers, strict=True)
        ]
        numbers = [NOBODY if client is None else client.number for client in clients]
        return [pack_numbers([self._last, *numbers]), *(part for answer in answers for part in answer.parts)]

    def give(self, note: Message) -> None:
        """Leave chunks to the takers, and end the holds of the others of that promise."""
        number, first, end = _read_give(note, self._open)
        for client, chunks in self._open.pop(number):
            _end(client, [*chunks[:first], *chunks[end:]])

    def end(self) -> None:
        """End all holds that were not given: the client will give nothing more."""
        for takers in self._open.values():
            for client, chunks in takers:
                _end(client, chunks)
        self._open.clear()

    def leave_all(self) -> None:
        """Leave all to the takers, until they end: what the client has given last was not heard."""
        self._open.clear()


def _end(client: Client, chunks: Sequence[Int64s]) -> None:
    if client.is_gone or not chunks:
        return
    with suppress(ProtocolError):  # it has freed what it did not have: no client of lwkv does
        client.holds.end(*np.unique(np.concatenate(chunks), return_counts=True))


def names_in(request: Message) -> list[str]:
    """Whom a promise is for."""
    return [name.decode(errors="replace") for name in request.parts[1::2]]


def _read(request: Message) -> tuple[int, list[str], Sequence[bytes]]:
    names, keys = names_in(request), request.parts[2::2]
    if len(names) != len(keys) or not 1 <= len(names) <= MOST_TAKERS:
        raise ProtocolError(f"PROMISE to {len(names)} clients; allowed: 1 to {MOST_TAKERS}, each with keys")
    if any(len(own) % KEY_BYTES for own in keys):
        raise ProtocolError(f"PROMISE of {[len(own) for own in keys]} bytes as keys of {KEY_BYTES} bytes")
    numbers = read_numbers(request.parts[0]).tolist()
    if len(numbers) != 1 or numbers[0] < 0:
        raise ProtocolError(f"PROMISE from chunk {numbers} on; allowed: 0 or more")
    return numbers[0], names, keys


def _read_give(note: Message, known: Mapping[int, object]) -> tuple[int, int, int]:
    numbers = read_numbers(b"".join(note.parts)).tolist()
    if len(numbers) != 3 or numbers[0] not in known or not 0 <= numbers[1] <= numbers[2]:
        raise ProtocolError(f"GIVE of {numbers}; allowed: a promise that is open, and chunks [first, end)")
    number, first, end = numbers
    return number, first, end
