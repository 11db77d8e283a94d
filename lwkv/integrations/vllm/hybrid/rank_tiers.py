"""The tiers below host memory of every rank, as the scheduler reaches them, in models with several groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lwkv.config.settings import Config
from lwkv.hybrid.lower_kinds import tier_setup
from lwkv.integrations.vllm.hybrid.kind_places import KindPlaces, RankPlaces, rank_places
from lwkv.integrations.vllm.hybrid.reports import HybridInfo
from lwkv.integrations.vllm.scheduler.lookup.index import Below, RankKeys
from lwkv.integrations.vllm.scheduler.lookup.tier_lookup import open_lookups
from lwkv.keys import ChunkKey
from lwkv.kinds import KindIndex
from lwkv.storage.tier import HOST
from lwkv.telemetry.counters import Counters


@dataclass(frozen=True)
class OneRank:
    """A rank, and its lower tiers."""

    info: HybridInfo
    below: Below

    @property
    def namespaces(self) -> dict[int, str]:
        return {number: kind.namespace for number, kind in self.info.kinds.items()}


class RankTiers:
    """What the ranks have below host memory, by what names, and how large their chunks are.

    `introduce` comes before anything is asked of the ranks.

    Args:
        open_below: opens a rank's tiers.
    """

    def __init__(self, open_below: Callable[[HybridInfo], Below]) -> None:
        self._open_below = open_below
        self._ranks: dict[int, OneRank] = {}

    def introduce(self, info: HybridInfo) -> None:
        """Learn of a rank. Raises ConfigError where its tiers cannot be opened."""
        known = self._ranks.get(info.rank)
        if known is None or known.info != info:
            if known is not None:
                known.below.close()
            self._ranks[info.rank] = OneRank(info, self._open_below(info))

    def leave_alone(self, rank: int, unread: Mapping[str, float]) -> None:
        """Learn which tiers a rank does not read, and for how long."""
        known = self._ranks.get(rank)
        if known is not None:
            known.below.leave_alone(unread)

    def places(self, index: KindIndex, hashes: Sequence[bytes]) -> list[RankPlaces]:
        """What each rank has of a prompt in host memory now, and its tiers, to be asked for the rest."""
        return [
            rank_places(index, rank.info.rank, rank.below, rank.namespaces, hashes)
            for rank in self._ranks.values()
        ]

    def follow(self, places: KindPlaces) -> None:
        """Let tiers know that a prompt's chunks are about to be used: they may wait long for their turn."""
        for kind, own in enumerate(places.tiers):
            below = [chunk for chunk, tier in enumerate(own) if tier not in (None, HOST)]
            if below and places.kinds[kind].form == "full":
                for rank in self._ranks.values():
                    names = rank.namespaces[kind]
                    rank.below.follow([ChunkKey(names, each) for each in places.hashes[: below[-1] + 1]])

    def keys(self, kind: int, hashes: Sequence[bytes]) -> RankKeys:
        """Of each rank, in their order."""
        names = [self._ranks[rank].namespaces[kind] for rank in sorted(self._ranks)]
        return [[ChunkKey(name, each) for each in hashes] for name in names]

    @property
    def most_room(self) -> int:
        """Pages that may be on their way, or pinned for waiting requests, at a time."""
        return min(rank.info.max_pages for rank in self._ranks.values()) // 2

    def pages(self, kind: int) -> int:
        """Pages that a chunk of a kind takes."""
        return max(rank.info.kinds[kind].num_pages for rank in self._ranks.values())

    def room(self, needed: Iterable[tuple[int, range]]) -> int:
        """Pages of chunks, by the number of their kind."""
        return sum(len(chunks) * self.pages(number) for number, chunks in needed)

    def size(self, kind: int) -> float:
        """How much a chunk of a kind is of a usual one."""
        info = next(iter(self._ranks.values())).info
        return info.kinds[kind].num_pages / info.usual_pages

    def close(self) -> None:
        """Close the tiers."""
        for rank in self._ranks.values():
            rank.below.close()


def open_below(config: Config, info: HybridInfo) -> Below:
    """Open a rank's lower tiers a second time, for look-ups. Raises ConfigError."""
    kinds = [*info.kinds.values()]
    return open_lookups(tier_setup(config, kinds, info.page_bytes, info.page_format, Counters()))
