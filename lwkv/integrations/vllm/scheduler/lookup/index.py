"""What the scheduler knows of the chunks that every rank has."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from typing import Protocol, TypeAlias

from lwkv.integrations.vllm.reports import RankInfo, RankReport
from lwkv.integrations.vllm.scheduler.lookup.kept_chunks import KeptChunks
from lwkv.keys import ChunkKey, chunk_keys
from lwkv.platforms.protocol import Int64s
from lwkv.shared_host.protocol import MOST_TAKERS
from lwkv.storage.tier import HOST

RankKeys: TypeAlias = "list[list[ChunkKey]]"

MOST_NEWS = 256
"""Changes that are remembered; who has missed more looks everything up again."""


class Below(Protocol):
    """One rank's tiers below host memory."""

    def find(self, keys: Sequence[ChunkKey]) -> Sequence[str | None]: ...

    def leave_alone(self, tiers: Mapping[str, float]) -> None: ...

    def follow(self, prompt: Sequence[ChunkKey]) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class RankChunks:
    """What is known of one rank: chunks in its host memory, and chunks that could not be loaded.

    Attributes:
        kept: chunks in its host memory, or surely there soon: those in `coming`.
    """

    info: RankInfo
    below: Below | None
    kept: KeptChunks
    failed: set[bytes] = field(default_factory=set)
    coming: Set[bytes] = frozenset()

    def found(self, chains: Sequence[Sequence[ChunkKey]]) -> list[str | None]:
        """The nearest of its tiers that each chunk can be loaded from, or None, one chain after the other."""
        keys = [key for chain in chains for key in chain]
        there: list[str | None] = [HOST if key.hash in self.kept else None for key in keys]
        if self.below is not None and not all(there):
            asked = [i for i, key in enumerate(keys) if there[i] is None and key.hash not in self.failed]
            for i, found in zip(asked, self.below.find([keys[i] for i in asked]), strict=True):
                there[i] = found
            for chain, tiers in zip(chains, _cut(there, chains), strict=True):
                if lower := [i for i, tier in enumerate(tiers) if tier not in (None, HOST)]:
                    # It may wait long for its turn, and is not to go meanwhile: nor what comes before it.
                    self.below.follow(chain[: lower[-1] + 1])
        return there


def leading(found: Sequence[str | None], first: int = 0) -> int:
    """How many chunks from `first` on are there without a gap."""
    return next((i for i in range(first, len(found)) if not found[i]), max(first, len(found))) - first


def _cut(found: Sequence[str | None], chains: Sequence[Sequence[ChunkKey]]) -> list[Sequence[str | None]]:
    """What was found of several chains, for each of them."""
    ends = list(accumulate(map(len, chains), initial=0))
    return [found[first:end] for first, end in pairwise(ends)]


def farther(tiers: Sequence[str | None]) -> str | None:
    """One of the tiers, not host memory if it can be helped; None if any is None."""
    return None if None in tiers else next((tier for tier in tiers if tier != HOST), HOST)


class ChunkIndex:
    """Which chunks all ranks can load. A chunk that one rank lacks is not there.

    Args:
        num_ranks: of which every one must have been heard of before anything is there at all.
        chunk_size: tokens of a chunk.
        partial: whether the rest of a prompt that fills no chunk is one as well.
        open_lower_tiers: opens a rank's tiers below host memory, which the scheduler reaches itself.
        clock: seconds.

    Attributes:
        changes: counts what was learnt; lookups of what it concerns may have other answers since.
    """

    def __init__(
        self,
        num_ranks: int,
        chunk_size: int,
        partial: bool = False,
        open_lower_tiers: Callable[[RankInfo], Below] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.changes = 0
        self._num_ranks = num_ranks
        self._chunk_size = chunk_size
        self._partial = partial
        self._open_below = open_lower_tiers
        self._ranks: dict[int, RankChunks] = {}
        # What the last changes were about; None for everything.
        self._news: deque[frozenset[bytes] | None] = deque(maxlen=MOST_NEWS)

    @property
    def tokens_per_row(self) -> int:
        """Tokens that some rank can only move together."""
        return max((rank.info.tokens_per_row for rank in self._ranks.values()), default=1)

    @property
    def namespaces(self) -> list[str]:
        """Of each rank's keys; none before all ranks are known."""
        known = len(self._ranks) == self._num_ranks
        return (
            [self._ranks[rank_number].info.namespace for rank_number in sorted(self._ranks)] if known else []
        )

    @property
    def most_chunks(self) -> int:
        """Chunks that one request can load: all of them are in host memory at the end of the load."""
        return min((rank.info.most_chunks for rank in self._ranks.values()), default=0)

    def __len__(self) -> int:
        """Chunks that may be in every rank's host memory: as many as in that of the rank with the fewest."""
        return min((len(rank.kept) for rank in self._ranks.values()), default=0)

    def introduce(self, info: RankInfo) -> None:
        """Learn how a rank names its chunks. Raises ConfigError where its lower tiers cannot be opened."""
        known = self._ranks.get(info.rank)
        if known is None or known.info != info:
            self._note(None)
            below = self._open_below(info) if self._open_below else None
            # It reports all that goes from memory of its own.
            most = info.most_chunks if info.host_name else sys.maxsize
            self._ranks[info.rank] = RankChunks(info, below, KeptChunks(most))

    def learn(self, report: RankReport) -> None:
        """Take over what a rank has, and has not."""
        self.introduce(report.info)
        rank = self._ranks[report.info.rank]
        if report.unread is not None and rank.below is not None:
            rank.below.leave_alone(report.unread)
        if report.unread is not None:
            self._note(None)
        elif news := frozenset((*report.kept, *report.dropped, *report.failed)):
            self._note(news)
        rank.kept.remove(report.dropped)
        rank.kept.add(report.kept)
        rank.failed.difference_update(report.kept)
        rank.coming = frozenset(report.coming)
        # Last: a chunk that is there and cannot be loaded must not be offered for ever.
        rank.kept.remove(report.failed)
        rank.failed.update(report.failed)

    def takers(self, keys: RankKeys) -> list[tuple[str, Sequence[ChunkKey]]]:
        """For whom an owner of host memory is to hold chunks: names of all ranks, each with its own keys.

        None where some rank has memory of its own, or there are more than one promise can be for.
        """
        names: list[tuple[str, Sequence[ChunkKey]]] = [
            (rank.info.host_name, own) for rank, own in self._each(keys)
        ]
        return names if all(name for name, _ in names) and len(names) <= MOST_TAKERS else []

    def learn_owner(self, keys: RankKeys, there: Sequence[Sequence[bool] | None] | None) -> None:
        """Take over which chunks the owner of host memory has for each rank.

        Args:
            there: for each rank and chunk; None for a rank of which it knows nothing, which is believed.
                None for all where it does not answer: then it has none.
        """
        news: set[bytes] = set()
        answers = there or [[]] * len(keys)
        for (rank, own), known in zip(self._each(keys), answers, strict=True):
            if known is None:
                continue
            hashes = [key.hash for key in own]
            there_now = [name for name, is_there in zip(hashes, known, strict=False) if is_there]
            has = [name for name in there_now if name not in rank.failed]
            gone = {name for name in hashes if name in rank.kept}.difference(has, rank.coming)
            news.update(gone, (name for name in has if name not in rank.kept))
            rank.kept.remove(gone)
            rank.kept.add(has)
        if news:
            self._note(frozenset(news))

    def clear(self) -> None:
        """Forget all chunks."""
        self._note(None)
        for rank in self._ranks.values():
            rank.kept.clear()
            rank.failed.clear()

    def keys(self, tokens: Int64s, salts: Sequence[str]) -> RankKeys:
        """The keys of the chunks of `tokens`, for each rank; none before all ranks are known."""
        return self.more_keys([], tokens, salts)

    def more_keys(self, keys: RankKeys, tokens: Int64s, salts: Sequence[str]) -> RankKeys:
        """`keys`, of full chunks, with those of `tokens` behind them, which alone are hashed."""
        if len(self._ranks) < self._num_ranks:
            return []
        names = [self._ranks[rank_number].info.namespace for rank_number in sorted(self._ranks)]
        keys = keys or [[] for _ in names]
        for own, name in zip(keys, names, strict=True):
            last = own[-1] if own else None
            own += chunk_keys(tokens, self._chunk_size, name, salts, self._partial, last)
        return keys

    def has(self, keys: RankKeys, chunk: int) -> bool:
        """Whether a chunk is in every rank's host memory."""
        return bool(keys) and all(own[chunk].hash in rank.kept for rank, own in self._each(keys))

    def is_coming(self, keys: RankKeys, chunk: int) -> bool:
        """Whether a chunk is on its way to some rank's host memory."""
        return any(own[chunk].hash in rank.coming for rank, own in self._each(keys))

    def are_kept(self, keys: RankKeys, chunks: range) -> list[bool]:
        """Which of these chunks are in every rank's host memory; none before all ranks are known."""
        kept = [True] * len(chunks) if keys else [False] * len(chunks)
        for rank, own in self._each(keys):
            kept = [there and own[chunk].hash in rank.kept for there, chunk in zip(kept, chunks, strict=True)]
        return kept

    def in_host(self, keys: RankKeys) -> list[str | None]:
        """HOST for each chunk that is in every rank's host memory, None for others. No tier is asked."""
        kept = self.are_kept(keys, range(len(keys[0]) if keys else 0))
        return [HOST if is_kept else None for is_kept in kept]

    def found(self, keys: RankKeys) -> list[str | None]:
        """The tier of each chunk that every rank has, or None; empty before all ranks are known.

        Where ranks have it in several, one below host memory.
        """
        return list(self.found_in([keys])[0])

    def found_in(self, chains: Sequence[RankKeys]) -> list[Sequence[str | None]]:
        """As `found`, for chunks of several texts; each tier is asked once for all of them."""
        by_rank = [rank.found(own) for rank, own in self._each_of(chains)]
        is_alone = len(by_rank) == 1
        found = by_rank[0] if is_alone else [farther(tiers) for tiers in zip(*by_rank, strict=True)]
        return _cut(found, [keys[0] if found else [] for keys in chains])

    def asks_lower_tiers(self, keys: RankKeys) -> bool:
        """Whether `found` would ask a tier below host memory."""
        return any(
            rank.below is not None and any(key.hash not in rank.kept for key in own)
            for rank, own in self._each(keys)
        )

    def prefix(self, keys: RankKeys) -> int:
        """How many leading chunks every rank can load, out of any tier."""
        return min(leading(self.found(keys)), self.most_chunks)

    def has_news(self, of: Set[bytes], since: int) -> bool:
        """Whether any change after the first `since` was about one of these chunks, by their hashes."""
        num_changes = self.changes - since
        if num_changes > len(self._news):
            return True
        recent = islice(reversed(self._news), num_changes)
        return any(news is None or not news.isdisjoint(of) for news in recent)

    def close(self) -> None:
        """Close the lower tiers."""
        for rank in self._ranks.values():
            if rank.below is not None:
                rank.below.close()

    def _note(self, news: frozenset[bytes] | None) -> None:
        self.changes += 1
        self._news.append(news)

    def _each_of(self, chains: Sequence[RankKeys]) -> Iterator[tuple[RankChunks, list[list[ChunkKey]]]]:
        """Every rank with its own keys of each chain."""
        if chains and all(chains):
            for place, rank in enumerate(self._ranks[rank_number] for rank_number in sorted(self._ranks)):
                yield rank, [keys[place] for keys in chains]

    def _each(self, keys: RankKeys) -> Iterator[tuple[RankChunks, list[ChunkKey]]]:
        """Every rank with its own keys."""
        if keys:
            yield from zip(
                (self._ranks[rank_number] for rank_number in sorted(self._ranks)), keys, strict=True
            )
