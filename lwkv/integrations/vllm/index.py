"""What the scheduler knows of the chunks that every rank has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from lwkv.integrations.vllm.reports import RankInfo, RankReport
from lwkv.keys import ChunkKey, chunk_keys
from lwkv.platforms.protocol import Int64s

Below: TypeAlias = Callable[[Sequence[ChunkKey]], Sequence[bool]]
RankKeys: TypeAlias = "list[list[ChunkKey]]"


class ChunkIndex:
    """Which chunks all ranks can load. A chunk that one rank lacks is not there.

    Args:
        num_ranks: of which every one must have been heard of before anything is there at all.
        chunk_size: tokens of a chunk.
        partial: whether the rest of a prompt that fills no chunk is one as well.
        below: asks the tiers below host memory, which the scheduler reaches itself.
    """

    def __init__(
        self, num_ranks: int, chunk_size: int, partial: bool = False, below: Below | None = None
    ) -> None:
        self._num_ranks = num_ranks
        self._chunk_size = chunk_size
        self._partial = partial
        self._below = below
        self._ranks: dict[int, RankInfo] = {}
        self._kept: dict[str, set[bytes]] = {}
        self._failed: dict[str, set[bytes]] = {}

    @property
    def tokens_per_row(self) -> int:
        """Tokens that some rank can only move together."""
        return max((info.tokens_per_row for info in self._ranks.values()), default=1)

    @property
    def knows_all_ranks(self) -> bool:
        return len(self._ranks) == self._num_ranks

    def __len__(self) -> int:
        """Chunks that are in every rank's host memory."""
        return min((len(self._kept[info.namespace]) for info in self._ranks.values()), default=0)

    def introduce(self, info: RankInfo) -> None:
        """Learn how a rank names its chunks."""
        self._ranks[info.rank] = info
        self._kept.setdefault(info.namespace, set())
        self._failed.setdefault(info.namespace, set())

    def learn(self, report: RankReport) -> None:
        """Take over what a rank has, and has not."""
        self.introduce(report.info)
        kept, failed = self._kept[report.info.namespace], self._failed[report.info.namespace]
        kept.difference_update(report.dropped)
        kept.update(report.kept)
        failed.difference_update(report.kept)
        kept.difference_update(report.failed)
        failed.update(report.failed)

    def clear(self) -> None:
        """Forget all chunks."""
        for known in (*self._kept.values(), *self._failed.values()):
            known.clear()

    def keys(self, tokens: Int64s, salts: Sequence[str]) -> RankKeys:
        """The keys of the chunks of `tokens`, for each rank; none before all ranks are known."""
        if not self.knows_all_ranks:
            return []
        return [
            chunk_keys(tokens, self._chunk_size, self._ranks[rank].namespace, salts, self._partial)
            for rank in sorted(self._ranks)
        ]

    def has(self, keys: RankKeys, chunk: int) -> bool:
        """Whether a chunk is in every rank's host memory."""
        return bool(keys) and all(
            rank_keys[chunk].hash in self._kept[rank_keys[chunk].namespace] for rank_keys in keys
        )

    def prefix(self, keys: RankKeys) -> int:
        """How many leading chunks every rank can load, out of any tier."""
        return min((self._rank_prefix(rank_keys) for rank_keys in keys), default=0)

    def _rank_prefix(self, keys: Sequence[ChunkKey]) -> int:
        there = [key.hash in self._kept[key.namespace] for key in keys]
        if self._below is not None and not all(there):
            self._look_below(self._below, keys, there)
        return there.index(False) if False in there else len(there)

    def _look_below(self, below: Below, keys: Sequence[ChunkKey], there: list[bool]) -> None:
        asked = [
            i for i, key in enumerate(keys) if not there[i] and key.hash not in self._failed[key.namespace]
        ]
        for i, found in zip(asked, below([keys[i] for i in asked]), strict=True):
            there[i] = found
