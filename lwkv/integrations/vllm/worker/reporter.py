"""What a worker has to report to the scheduler: which chunks it has, and how its steps went."""

from __future__ import annotations

from collections.abc import Sequence

from lwkv.engine import CacheEngine
from lwkv.integrations.vllm.reports import RankInfo, RankReport
from lwkv.integrations.vllm.worker.presence import Presence
from lwkv.integrations.vllm.worker.tier_news import TierNews
from lwkv.keys import ChunkKey
from lwkv.storage.prefetch import Prefetches


class Reporter:
    """Gathers what has changed since the last report.

    Args:
        prefetches: the worker's, whose ends are reported.
    """

    def __init__(self, engine: CacheEngine, info: RankInfo, prefetches: Prefetches) -> None:
        self._engine = engine
        self._info = info
        self._prefetches = prefetches
        self.presence = Presence(engine.parts().storage)
        storage = engine.parts().storage
        self._tiers = TierNews(storage, engine.parts().clock) if storage.lower.guards else None
        self._failed: list[ChunkKey] = []
        self._accepted: list[ChunkKey] = []
        self._outcome: tuple[int, bool] | None = None

    def step_ended(self, step: int, stored: bool) -> None:
        """Note that a step has ended, and whether its stores were accepted, or it had none."""
        self._outcome = step, stored

    def accepted(self, keys: Sequence[ChunkKey]) -> None:
        """Note chunks of a store that was accepted."""
        self._accepted += keys

    def failed(self, keys: Sequence[ChunkKey]) -> None:
        """Note chunks that could not be loaded."""
        self._failed += keys

    def report(self) -> RankReport | None:
        """Changes not yet reported; None for none."""
        fetched = self._prefetches.ended()  # before what is kept: all that these have brought is in that
        kept, dropped = self.presence.changes(self._accepted)
        failed = [key.hash for key in self._failed]
        self._accepted, self._failed = [], []
        outcome, self._outcome = self._outcome, None
        unread = None if self._tiers is None else self._tiers.unread()
        read = {} if self._tiers is None else self._tiers.reads()
        if outcome is None and unread is None and not (kept or dropped or failed or fetched or read):
            return None
        step, stored = outcome or (0, True)
        coming = [key.hash for key in self.presence.on_its_way]
        return RankReport(self._info, step, stored, kept, dropped, failed, unread, fetched, read, coming)
