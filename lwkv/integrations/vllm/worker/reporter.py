"""What a worker has to report to the scheduler: which chunks it has, and how its steps went."""

from __future__ import annotations

from collections.abc import Sequence

from lwkv.engine import CacheEngine
from lwkv.integrations.vllm.reports import RankInfo, RankReport
from lwkv.integrations.vllm.worker.presence import Presence
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
        self._has_lower_tiers = bool(engine.parts().storage.lower.guards)
        self._failed: list[ChunkKey] = []
        self._accepted: list[ChunkKey] = []
        self._outcome: tuple[int, bool] | None = None
        self._unread: dict[str, float] = {}
        self._read: dict[str, tuple[int, float]] = {}

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
        unread = self._new_unread_tiers() if self._has_lower_tiers else None
        read = self._new_reads() if self._has_lower_tiers else {}
        if outcome is None and unread is None and not (kept or dropped or failed or fetched or read):
            return None
        step, stored = outcome or (0, True)
        return RankReport(self._info, step, stored, kept, dropped, failed, unread, fetched, read)

    def _new_unread_tiers(self) -> dict[str, float] | None:
        """The tiers that loads skip, and for how many seconds; None where nothing has changed."""
        unread = self._engine.parts().storage.unread_tiers()
        before, self._unread = self._unread, unread
        if unread == before:
            return None
        now = self._engine.parts().clock()
        return {name: until - now for name, until in unread.items()}

    def _new_reads(self) -> dict[str, tuple[int, float]]:
        """Bytes that were read from each lower tier since the last call, and in how many seconds."""
        before, self._read = self._read, self._engine.parts().storage.read_times()
        reads = {name: (total, *before.get(name, (0, 0.0))) for name, total in self._read.items()}
        return {name: (now[0] - size, now[1] - s) for name, (now, size, s) in reads.items() if now[0] > size}
