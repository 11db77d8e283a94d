"""What every worker's half reports to the scheduler's half, once a step."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What the scheduler must know of a rank to name its chunks.

    Attributes:
        rank: over tensor and pipeline parallel ranks.
        namespace: of the rank's keys.
        tokens_per_row: tokens that can only be moved together.
        num_layers, page_bytes, page_format: of its chunks.
        most_chunks: that its host memory has room for.
        host_name: by which the owner of host memory has chunks promised to it; empty for memory of its own.
    """

    rank: int
    namespace: str
    tokens_per_row: int = 1
    num_layers: int = 1
    page_bytes: int = 1
    page_format: str = ""
    most_chunks: int = sys.maxsize
    host_name: str = ""


@dataclass(frozen=True, slots=True)
class RankReport:
    """How a step was for one rank. Chunks are named by the hashes of their keys.

    Attributes:
        step: of the orders that this answers.
        stored: whether the stores were accepted; if not, they are to be ordered again.
        kept: chunks that are in host memory or surely will be.
        dropped: chunks that are not in host memory any more.
        failed: chunks that could not be loaded, wherever they were thought to be.
        unread: the lower tiers that loads skip, and for how many seconds, infinity for until the rank
            reports again; None where that is as reported last.
        read: for lower tiers that were read since the last report, the bytes, and the seconds that it took.
        fetched: numbers of fetches that have ended: what they have brought is among `kept`, now or before.
        coming: all chunks that were reported as kept, and may not be there yet.
    """

    info: RankInfo
    step: int
    stored: bool = True
    kept: Sequence[bytes] = field(default=())
    dropped: Sequence[bytes] = field(default=())
    failed: Sequence[bytes] = field(default=())
    unread: Mapping[str, float] | None = None
    fetched: Sequence[int] = field(default=())
    read: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    coming: Sequence[bytes] = field(default=())


@dataclass(frozen=True, slots=True)
class StepReports:
    """The reports of one step from one or more ranks."""

    reports: tuple[RankReport, ...]

    def aggregate(self, other: StepReports) -> StepReports:
        """Both together; vLLM calls this for the ranks of a step."""
        return StepReports(self.reports + other.reports)
