"""Which chunks came and went, with their tokens, for routers that send a prompt where its KV is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lwkv.integrations.vllm.orders import Move
from lwkv.integrations.vllm.reports import RankReport
from lwkv.keys import ChunkKey


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk that host memory has now; `parent` is the hash of the chunk in front of it."""

    hash: bytes
    parent: bytes | None
    tokens: tuple[int, ...]
    lora: str | None


@dataclass(frozen=True, slots=True)
class Removed:
    """A chunk that host memory has no more."""

    hash: bytes


class KVEventLog:
    """Writes down what the first rank reports; all ranks store and load the same chunks."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._facts: dict[bytes, Stored] = {}
        self._told: set[bytes] = set()
        self._events: list[Stored | Removed] = []

    def expect(self, move: Move, keys: Sequence[ChunkKey], lora: str | None) -> None:
        """Remember the chunks of a move, which may be reported as kept; `keys` are the first rank's."""
        for chunk in range(move.first // self._chunk_size, -(-move.end // self._chunk_size)):
            begin = chunk * self._chunk_size
            tokens = tuple(move.tokens[begin : begin + self._chunk_size].tolist())
            parent = keys[chunk - 1].hash if chunk else None
            self._facts[keys[chunk].hash] = Stored(keys[chunk].hash, parent, tokens, lora)

    def learn(self, report: RankReport) -> None:
        """Take over what a rank reports."""
        if report.info.rank != 0:
            return
        for name in (*report.dropped, *report.failed):
            self._facts.pop(name, None)
            if name in self._told:
                self._told.remove(name)
                self._events.append(Removed(name))
        for name in report.kept:
            if name in self._facts and name not in self._told:
                self._told.add(name)
                self._events.append(self._facts[name])

    def take(self) -> Iterator[Stored | Removed]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return iter(events)
