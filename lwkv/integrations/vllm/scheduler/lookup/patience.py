"""For how long a request waits for what lower tiers bring, and when it had better be computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lwkv.integrations.vllm.scheduler.lookup.measured.prefill_times import Floats
from lwkv.storage.prefetch import CHUNKS_AT_A_TIME
from lwkv.storage.tier import HOST

MORE = 0.05
"""A request may take this share longer than without waiting at all."""

LATER = 1.25
"""A tier that was measured may take so much longer than it should."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request takes with the chunks that are there, and how long the others should take to come.

    Attributes:
        left: seconds that the prompt takes once the first chunks are in host memory: none, one, and so on.
        promised: seconds until so many are there, as estimated; 0 where the tier's speed is not known.
        step_s: seconds from one step to the next: a request that waits is asked about before each.
    """

    left: Floats
    promised: Floats
    step_s: float

    def waits_s(self, num_at_first: int, num_there: int) -> float:
        """How long a request may have waited by the time when `num_there` chunks are there.

        What has come saves time: so much may have been waited, and a little more, one step in any case. The
        chunks that a tier brings next may also take what was estimated for them.
        """
        saved = (1 + MORE) * self.left[num_at_first] - self.left[num_there] - self.step_s
        coming = min(num_there + CHUNKS_AT_A_TIME, len(self.promised) - 1)
        return float(max(saved, self.step_s / 2, LATER * self.promised[coming]))

    def waits_for_next_s(self, num_there: int) -> float:
        """How long a request may wait since the last chunk came.

        As long as the next ones should take, and then for what it costs more to compute all that is missing.
        """
        coming = min(num_there + CHUNKS_AT_A_TIME, len(self.promised) - 1)
        promised = self.promised[coming] - self.promised[num_there]
        return float(LATER * promised + self.left[num_there] - self.left[-1] + self.step_s)


class Wait:
    """One request's wait for its chunks.

    Args:
        is_there: whether a chunk of the prompt is in the host memory of every rank.
        first: the first chunk that it waits for.
        tiers: where each of the chunks was found, from that one on.
        since: when it began to wait.

    Attributes:
        moved_at: when a chunk came last, or it began.
    """

    def __init__(
        self,
        patience: Patience,
        is_there: Callable[[int], bool],
        first: int,
        tiers: Sequence[str],
        since: float,
    ) -> None:
        self._patience = patience
        self._is_there = is_there
        self._first = first
        self._tiers = tiers
        self.num_there = 0
        self.since = self.moved_at = since
        self._follow(since)
        self._at_first = self.num_there

    @property
    def num_wanted(self) -> int:
        return len(self._tiers)

    @property
    def estimates(self) -> str:
        """How long it is thought to take, for the log."""
        waits_s, left = self._patience.promised[-1], self._patience.left
        return (
            f"they should be there after {1e3 * waits_s:.1f} ms (0: the tier was not measured), and the "
            f"prompt takes {1e3 * left[-1]:.1f} ms then, {1e3 * left[self._at_first]:.1f} ms without them"
        )

    @property
    def tiers_missing(self) -> set[str]:
        """The tiers that have not brought all that is waited for."""
        return {*self._tiers[self.num_there :]} - {HOST}

    @property
    def is_in_vain(self) -> bool:
        """Whether nothing has come."""
        return self.num_there == self._at_first

    def is_over(self, now: float) -> bool:
        """Whether the request is better off with what is there."""
        self._follow(now)
        is_too_long = now - self.since >= self._patience.waits_s(self._at_first, self.num_there)
        return is_too_long or now - self.moved_at >= self._patience.waits_for_next_s(self.num_there)

    def _follow(self, now: float) -> None:
        while self.num_there < len(self._tiers) and self._is_there(self._first + self.num_there):
            self.num_there += 1
            self.moved_at = now
